"""`depthroute inspect`, `generate` and `report`: what a model routes, says and learned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from depthroute.cli.app import AsJson, app

Model = Annotated[str, typer.Argument(help="Folder or hub id: plain, routed, or an adapter.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]


@app.command(epilog="Example: `depthroute inspect ./smol-delta --text wiki.txt`")
def inspect(
    model: Annotated[str, typer.Argument(help="Folder or hub id of a routed model.")],
    text: Annotated[Path, typer.Option(help="Text to run the model on.")],
    tokens: Annotated[int, typer.Option(min=2, help="How many tokens of it.")] = 512,
    gradients: Annotated[
        bool, typer.Option("--gradients", help="Also gradient magnitudes (for --json).")
    ] = False,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Draw the routing map: which sources every site reads, averaged over the text.

    A row is a site, a column a source; darker is more weight. `max` and `entropy` are normalised
    by the number of sources, so that sites of different depth compare.
    """
    from depthroute.cli.convert import read_text
    from depthroute.diagnostics import record, trace
    from depthroute.diagnostics.terminal import routing_map
    from depthroute.errors import ConfigError

    if gradients and not as_json:
        raise ConfigError("--gradients are in the JSON alone; add --json, or leave it out")
    content = read_text(text)
    with Console(stderr=True).status("running the model"):
        routed, tokenizer = load(model, device, needs_routing=True)
        ids = tokenizer(content, return_tensors="pt", verbose=False).input_ids[:, :tokens]
        if ids.shape[1] < 2:
            raise ConfigError(
                f"--text {str(text)!r} holds {ids.shape[1]} tokens, and the loss of a text needs "
                "at least 2; give a longer one"
            )
        found = record(
            trace(routed, ids.to(routed.device), ids.to(routed.device), gradients=gradients)
        )
    if as_json:
        print(json.dumps({"model": model, "num_tokens": ids.numel()} | found, indent=2))
        return
    console = Console(highlight=False)
    console.print(f"{model}: loss {found['loss']:.4f} over {ids.numel()} tokens", soft_wrap=True)
    console.print(routing_map(found, console))


@app.command(epilog='Example: `depthroute generate ./smol-delta --prompt "The depth of"`')
def generate(
    model: Model,
    prompt: Annotated[str, typer.Option(help="Text to continue; `-` reads standard input.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to add.")] = 100,
    temperature: Annotated[
        float, typer.Option(help="0 takes the most likely token; higher is freer.")
    ] = 0.0,
    top_k: Annotated[int | None, typer.Option(min=1, help="Draw among the k likeliest.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw among this much probability.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Makes a drawn text repeatable.")] = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Continue a prompt; the text appears as it is made."""
    import sys

    from depthroute.models.generation import check_sampling, continue_prompt

    check_sampling(temperature, top_k, top_p, seed)
    given = sys.stdin.read() if prompt == "-" else prompt
    with Console(stderr=True).status("loading the model"):
        loaded, tokenizer = load(model, device)

    def show(piece: str) -> None:
        if not as_json:
            print(piece, end="", flush=True)

    show(given)
    text = continue_prompt(
        loaded,
        tokenizer,
        given,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        on_text=show,
    )
    if as_json:
        print(json.dumps({"model": model, "prompt": given, "text": text}, indent=2))
    else:
        print()


def load(name: str, device: str, *, needs_routing: bool = False) -> tuple[Any, Any]:
    """The model on its device, and its tokenizer."""
    from depthroute.errors import CheckpointError
    from depthroute.models.command import load_model, load_tokenizer, tokenizer_source
    from depthroute.train.prepare import choose_device

    where = choose_device(device)
    model = load_model(name)
    if needs_routing and not hasattr(model, "sites"):
        raise CheckpointError(
            f"{name!r} holds a plain {model.config.model_type!r} model, which routes nothing; "
            "convert it first (depthroute convert)"
        )
    return model.to(where), load_tokenizer(tokenizer_source(name))


@app.command(epilog="Example: `depthroute report runs/compare-1 --out report.html`")
def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Run directories of `compare`, `train` or `finetune`.")
    ],
    out: Annotated[Path, typer.Option(help="Page to write.")] = Path("report.html"),
    figures: Annotated[
        Path | None, typer.Option(help="Also write every figure as SVG into this folder.")
    ] = None,
    title: Annotated[str | None, typer.Option(help="Heading; left out, the runs' names.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write one self-contained page of one or several runs: curves, routing maps, cost.

    The page needs no network and no other file. Hover for values, click a legend entry to hide
    a method everywhere, and save any panel as SVG or PNG.
    """
    from depthroute.diagnostics.report import write_figures, write_report

    data = write_report(runs, out, title)
    written = [] if figures is None else write_figures(runs, figures)
    if as_json:
        print(json.dumps(data, indent=2))
        return
    console = Console(highlight=False, soft_wrap=True)
    size = out.stat().st_size / 1024
    counts = (("method", len(data["series"])), ("run", len(data["runs"])))
    words = [f"{count} {name}{'' if count == 1 else 's'}" for name, count in counts]
    console.print(" of ".join(words))
    console.print(f"written: {out} ({size:,.0f} KiB)")
    if written:
        console.print(f"written: {len(written)} figures in {figures}")
