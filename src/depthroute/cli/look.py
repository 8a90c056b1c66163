"""`depthroute inspect`, `generate` and `report`: what a model routes, says and learned."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from depthroute.cli.app import AsJson, Device, TrustRemoteCode, app
from depthroute.cli.terminal import (
    PlainConsole,
    for_stdout,
    output,
    print_json,
    print_table,
    progress,
)

Model = Annotated[str, typer.Argument(help="Folder or hub id: plain, routed, or an adapter.")]


@app.command(epilog="Example: `depthroute inspect ./smol-delta --text wiki.txt`")
def inspect(
    model: Annotated[str, typer.Argument(help="Folder or hub id of a routed model.")],
    text: Annotated[Path | None, typer.Option(help="Text to run the model on.")] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Instead: what every place reads, as the plan has it.")
    ] = False,
    tokens: Annotated[int, typer.Option(min=2, help="How many tokens of it.")] = 512,
    gradients: Annotated[
        bool, typer.Option("--gradients", help="Also gradient magnitudes (for --json).")
    ] = False,
    importance: Annotated[
        bool,
        typer.Option(
            "--importance",
            help="Also how much the loss rises where a site may not read a source: a forward pass "
            "for every source of every site.",
        ),
    ] = False,
    sites: Annotated[
        str, typer.Option(help="Sites to try for --importance, such as `layers.1*.mlp`.")
    ] = "*",
    device: Device = "auto",
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Draw the routing map: which sources every site reads, averaged over the text.

    A row is a site, a column a source; darker is more weight. `max` and `entropy` are normalised
    by the number of sources, so that sites of different depth compare.
    """
    from depthroute.cli.convert import read_text
    from depthroute.diagnostics import record, trace
    from depthroute.diagnostics.record import first_not_finite
    from depthroute.diagnostics.terminal import importance_table, routing_map
    from depthroute.errors import CheckpointError, ConfigError
    from depthroute.models.loading import from_pretrained, tokens_of

    if plan:
        if text is not None or gradients or importance or as_json:
            raise ConfigError(
                "--plan runs nothing; leave out --text, --gradients, --importance and --json"
            )
        print(from_pretrained(model, trust_remote_code=trust_remote_code).plan)
        return
    if text is None:
        raise ConfigError("give the text to run the model on with --text, or ask for the --plan")
    if gradients and not as_json:
        raise ConfigError("--gradients are in the JSON alone; add --json, or leave it out")
    if sites != "*" and not importance:
        raise ConfigError(f"--sites {sites!r} says where to look for --importance; add that")
    content = read_text(text)
    with progress("running the model"):
        routed, tokenizer = load(
            model, device, needs_routing=True, trust_remote_code=trust_remote_code
        )
        method = routed.config.routing_config().name
        ids = tokens_of(content, tokenizer, routed)[:, :tokens]
        if ids.shape[1] < 2:
            raise ConfigError(
                f"--text {str(text)!r} holds {ids.shape[1]} tokens, and the loss of a text needs "
                "at least 2; give a longer one"
            )
        ids = ids.to(routed.device)
        seen = trace(routed, ids, ids, gradients=gradients)
    rises = _importance(routed, ids, sites, seen) if importance else None
    routing = record(seen, rises)
    if (site := first_not_finite(routing)) is not None:
        raise CheckpointError(
            f"the routing weights of {model!r} are no numbers at {site}: it diverged in training "
            "or its file is damaged"
        )
    if as_json:
        print_json({"model": model, "method": method, "num_tokens": ids.numel()} | routing)
        return
    console = PlainConsole(highlight=False)
    loss = "not finite" if routing["loss"] is None else f"{routing['loss']:.4f}"
    console.print(f"{model} ({method}): loss {loss} over {ids.numel()} tokens", soft_wrap=True)
    console.print(routing_map(routing, console))
    if importance:
        print_table(importance_table(routing))


def _importance(model: Any, ids: Any, sites: str, seen: Any) -> Any:
    from depthroute.diagnostics import importance

    with progress("without one source") as advance:
        return importance(model, ids, sites=sites, seen=seen, progress=advance)


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
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Continue a prompt; the text appears as it is made."""
    from depthroute.models.generation import check_sampling, continue_prompt

    check_sampling(temperature, top_k, top_p, seed)
    start = _standard_input() if prompt == "-" else prompt
    with progress("loading the model"):
        loaded, tokenizer = load(model, device, trust_remote_code=trust_remote_code)

    def show(piece: str) -> None:
        if not as_json:
            print(for_stdout(piece), end="", flush=True)

    show(start)
    try:
        text = continue_prompt(
            loaded,
            tokenizer,
            start,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            on_text=show,
        )
    finally:
        show("\n")  # an error begins on a line of its own
    if as_json:
        print_json({"model": model, "prompt": start, "text": text})


def _standard_input() -> str:
    from depthroute.errors import DepthrouteError

    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise DepthrouteError(f"standard input is no text: {error}") from error


def load(
    name: str, device: str, *, needs_routing: bool = False, trust_remote_code: bool = False
) -> tuple[Any, Any]:
    """The model on its device, and its tokenizer."""
    from depthroute.models import attention
    from depthroute.models.loading import (
        from_pretrained,
        load_model,
        load_tokenizer,
        tokenizer_source,
    )
    from depthroute.train.prepare import choose_device

    where = choose_device(device)
    loaded = from_pretrained if needs_routing else load_model
    model = attention.use(loaded(name, trust_remote_code=trust_remote_code))
    tokenizer = load_tokenizer(tokenizer_source(name), trust_remote_code=trust_remote_code)
    return model.to(where), tokenizer


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
        print_json(data)
        return
    from depthroute.diagnostics.finding import finding
    from depthroute.runs.display import number_of

    console = output()
    size = out.stat().st_size / 1024
    methods, count = (len(data[name]) for name in ("series", "runs"))
    console.print(f"{number_of(methods, 'method')} of {number_of(count, 'run')}")
    console.print(finding(data))
    console.print(f"written: {out} ({size:,.0f} KiB)")
    if written:
        console.print(f"written: {len(written)} figures in {figures}")
