"""`depthroute train` and `depthroute finetune`: one loop, from scratch or from a checkpoint."""

import os
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from depthroute.cli.app import AsJson, Preset, app
from depthroute.cli.convert import Base, DriftOptions
from depthroute.cli.options import (
    DATA,
    MeshOptions,
    OneModelOptions,
    RoutingOptions,
    Shape,
    TextOptions,
    Tokenizer,
    Watching,
    assigned,
)
from depthroute.cli.terminal import notes, output, print_json

Data = Annotated[str, DATA]


@app.command(
    epilog="Example: `depthroute train --preset tiny --data book.txt --method delta --steps 500 "
    "--out runs/book`"
)
def train(
    *,
    data: Data,
    preset: Preset = "tiny",
    tokenizer: Tokenizer = None,
    routing: RoutingOptions,
    model: Shape = None,
    options: OneModelOptions,
    mesh: MeshOptions,
    text: TextOptions,
    as_json: AsJson = False,
) -> None:
    """Train a preset's model from scratch on your text.

    The text is tokenised once and kept. Ctrl-C and SIGTERM save and stop; `--resume auto` goes on
    as if nothing had happened. The run directory ends with config.json, metrics.jsonl,
    checkpoints/, traces.json and model/, which `from_pretrained` loads. For several devices put
    `torchrun --nproc-per-node N -m` before `depthroute train`, and say with `--tp` and `--pp` how
    they share the model.
    """
    chosen = routing.chosen()

    def start(request: Any) -> dict[str, Any]:
        from depthroute.train import launch

        return launch.train(request, preset, chosen, assigned(model, "--model"))

    source = {"data": data, "tokenizer": tokenizer} | vars(text)
    _run("train", start, source, options, mesh, as_json)


@app.command(
    epilog="Example: `depthroute finetune --base ./SmolLM2-135M --method delta-block "
    "--data wiki.jsonl.gz --out runs/smol-delta`"
)
def finetune(
    *,
    base: Base,
    data: Data,
    routing: RoutingOptions,
    freeze_base: Annotated[
        bool, typer.Option("--freeze-base", help="Train the routing parameters alone.")
    ] = False,
    drift: DriftOptions,
    options: OneModelOptions,
    mesh: MeshOptions,
    text: TextOptions,
    as_json: AsJson = False,
) -> None:
    """Convert a pretrained model and train it on: the published recipe, with your changes.

    Base rate 5e-5, routing rate 5e-3, both to 3e-5 by a cosine; 20,000 steps of 65,536 tokens.
    The converted model must start as the base does, or nothing is trained. Interruption, resuming
    and the run directory are those of `depthroute train`.
    """
    chosen, largest = routing.chosen("delta"), drift.largest()

    def start(request: Any) -> dict[str, Any]:
        from depthroute.train import launch

        return launch.finetune(request, base, chosen, freeze_base=freeze_base, tolerance=largest)

    _run("finetune", start, {"data": data} | vars(text), options, mesh, as_json)


def _run(
    command: str,
    start: Callable[[Any], dict[str, Any]],
    source: dict[str, Any],
    options: OneModelOptions,
    mesh: MeshOptions,
    as_json: bool,
) -> None:
    """With progress on stderr, so that stdout holds the result alone."""
    changes, out, layout = options.changes(), options.directory(command), mesh.layout()
    from depthroute.diagnostics import look
    from depthroute.runs.listing import resume_command
    from depthroute.train.launch import Request
    from depthroute.train.loop import Interrupted

    is_main = os.environ.get("RANK", "0") == "0"
    aside = notes(quiet=not is_main)
    with Watching(aside, "compiling" if changes.get("compile") else "") as watching:
        request = Request(
            out=out,
            resume=options.is_resumed,
            seed=options.seed,
            device=options.device,
            layout=layout,
            changes=changes,
            tensorboard=options.tensorboard,
            wandb=options.wandb,
            watch=watching.watch(),
            look=look,
            options=options.chosen.text(out),
            **source,
        )
        try:
            outcome = start(request)
        except Interrupted as stopped:
            watching.end()
            aside.print(f"stopped after step {stopped.step}, saved; resume with:")
            processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            aside.print(f"  {resume_command(out, command, processes=processes)}")
            raise typer.Exit(128 + stopped.signal) from None
    if not is_main:
        return
    if as_json:
        print_json(outcome)
        return
    for line in _told(outcome, options.chosen.options.get("data")):
        output().print(line)


def _told(outcome: dict[str, Any], data: str | None) -> Iterator[str]:
    """What came of it, from before the first step to what to do next."""
    if "identity" in outcome:
        identity = outcome["identity"]
        yield (
            f"converted: the largest logit difference to the base was "
            f"{identity['max_difference']:.2g} over {identity['num_tokens']:,} tokens"
        )
    best = outcome["best"]  # none where no validation gave a number
    lowest = "" if best is None else f" (best {best['loss']:.4f} after step {best['step']})"
    loss = f"{outcome['validation_loss']:.4f} nats per {outcome.get('unit', 'token')}"
    yield f"{outcome['steps']} steps, validation loss {loss}{lowest}"
    if "validation_loss_before" in outcome:
        before = outcome["validation_loss_before"]
        change = outcome["validation_loss"] - before
        yield f"before the first step it was {before:.4f}: a change of {change:+.4f}"
    if routing := outcome.get("routing"):
        yield from _routing_lines(routing)
    yield f"model: {outcome['model']}"
    yield "next:"
    text = data if data is not None and Path(data).is_file() else "FILE"
    is_routed = outcome.get("mean_normalised_max") is not None
    for words in (
        ["report", outcome["run"]],
        *([["inspect", outcome["model"], "--text", text]] if is_routed else []),
        ["generate", outcome["model"], "--prompt", "The"],
        ["eval", outcome["model"], "--perplexity", "FILE"],
    ):
        yield "  " + shlex.join(["depthroute", *words])


def _routing_lines(routing: dict[str, Any]) -> Iterator[str]:
    start, last = (routing[f"normalised_max_{when}"] for when in ("before", "after"))
    if start is not None and last is not None:
        yield (
            f"routing: normalised max weight {start:.3f} before, {last:.3f} after (0 is uniform, "
            "1 picks one source); changed most:"
        )
    for change in routing["changed_most"]:
        yield (
            f"  {change['site']}: {change['moved']:.1%} of its weight lies elsewhere, "
            f"{change['source']} {change['before']:.3f} to {change['after']:.3f}"
        )
