"""`depthroute train` and `depthroute finetune`: one loop, from scratch or from a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from depthroute.cli.app import AsJson, TrustRemoteCode, app
from depthroute.cli.convert import (
    Base,
    BlockSize,
    Init,
    Method,
    NumBlocks,
    RoutingSettings,
    Tolerance,
    chosen_tolerance,
    routing_config,
)
from depthroute.cli.options import (
    Board,
    Cache,
    Data,
    Device,
    HeldOut,
    MaxTokens,
    Out,
    Parallel,
    Resume,
    Seed,
    Settings,
    Shape,
    Steps,
    TextField,
    Tokenizer,
    Validation,
    Wandb,
    Watching,
    Workers,
    assigned,
    changed_settings,
    check_resume,
    resume_command,
)
from depthroute.cli.terminal import notes, output, print_json


@app.command(
    epilog="Example: `depthroute train --preset tiny --data book.txt --method delta --steps 500 "
    "--out runs/book`"
)
def train(
    data: Data,
    preset: Annotated[str, typer.Option(help="Model shape; see `depthroute presets`.")] = "tiny",
    tokenizer: Tokenizer = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="attnres, delta, x0_skip, depth_attention or standard; left out, the preset's."
        ),
    ] = None,
    num_blocks: NumBlocks = None,
    block_size: BlockSize = None,
    init: Annotated[
        str | None,
        typer.Option(help="paper, reference, complete, centered or gate; left out, paper."),
    ] = None,
    routing: RoutingSettings = None,
    model: Shape = None,
    steps: Steps = None,
    settings: Settings = None,
    out: Out = None,
    resume: Resume = "never",
    seed: Seed = 0,
    device: Device = "auto",
    parallel: Parallel = "ddp",
    text_field: TextField = None,
    held_out: HeldOut = None,
    validation: Validation = None,
    max_tokens: MaxTokens = None,
    workers: Workers = None,
    cache: Cache = None,
    tensorboard: Board = False,
    wandb: Wandb = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Train a preset's model from scratch on your text.

    The text is tokenised once and kept. Ctrl-C and SIGTERM save and stop; `--resume auto` goes on
    as if nothing had happened. The run directory ends with config.json, metrics.jsonl,
    checkpoints/, traces.json and model/, which `from_pretrained` loads. For several devices put
    `torchrun --nproc-per-node N -m` before `depthroute train`.
    """
    given = (num_blocks, block_size, init, routing)
    if method is None and any(option is not None for option in given):
        from depthroute.errors import ConfigError

        raise ConfigError("routing options need the method they belong to; add --method")
    chosen = None if method is None else routing_config(method, *given)
    common = {"tokenizer": tokenizer, "seed": seed, "device": device, "parallel": parallel}
    common |= {"text_field": text_field, "held_out": held_out, "max_tokens": max_tokens}
    common |= {"validation": validation, "trust_remote_code": trust_remote_code}
    common |= {"workers": workers, "cache": cache, "tensorboard": tensorboard, "wandb": wandb}

    def start(request: Any) -> dict[str, Any]:
        from depthroute.train import launch

        return launch.train(request, preset, chosen, assigned(model, "--model"))

    _run("train", start, data, out, resume, changed_settings(settings, steps), common, as_json)


@app.command(
    epilog="Example: `depthroute finetune --base ./SmolLM2-135M --method delta --num-blocks 4 "
    "--data wiki.jsonl.gz --out runs/smol-delta`"
)
def finetune(
    base: Base,
    data: Data,
    method: Method = "delta",
    num_blocks: NumBlocks = None,
    block_size: BlockSize = None,
    init: Init = None,
    routing: RoutingSettings = None,
    freeze_base: Annotated[
        bool, typer.Option("--freeze-base", help="Train the routing parameters alone.")
    ] = False,
    tolerance: Tolerance = None,
    allow_drift: Annotated[
        bool, typer.Option("--allow-drift", help="Start whatever the difference.")
    ] = False,
    steps: Steps = None,
    settings: Settings = None,
    out: Out = None,
    resume: Resume = "never",
    seed: Seed = 0,
    device: Device = "auto",
    parallel: Parallel = "ddp",
    text_field: TextField = None,
    held_out: HeldOut = None,
    validation: Validation = None,
    max_tokens: MaxTokens = None,
    workers: Workers = None,
    cache: Cache = None,
    tensorboard: Board = False,
    wandb: Wandb = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Convert a pretrained model and train it on: the published recipe, with your changes.

    Base rate 5e-5, routing rate 5e-3, both to 3e-5 by a cosine; 20,000 steps of 65,536 tokens.
    The converted model must start as the base does, or nothing is trained. Interruption, resuming
    and the run directory are those of `depthroute train`.
    """
    chosen = routing_config(method, num_blocks, block_size, init, routing)
    largest = chosen_tolerance(tolerance, allow_drift)
    common = {"seed": seed, "device": device, "parallel": parallel}
    common |= {"text_field": text_field, "held_out": held_out, "max_tokens": max_tokens}
    common |= {"validation": validation, "trust_remote_code": trust_remote_code}
    common |= {"workers": workers, "cache": cache, "tensorboard": tensorboard, "wandb": wandb}

    def start(request: Any) -> dict[str, Any]:
        from depthroute.train import launch

        return launch.finetune(
            request,
            base,
            chosen,
            freeze_base=freeze_base,
            tolerance=largest,
        )

    _run("finetune", start, data, out, resume, changed_settings(settings, steps), common, as_json)


def _run(
    command: str,
    start: Callable[[Any], dict[str, Any]],
    data: str,
    out: Path | None,
    resume: str,
    changes: dict[str, Any],
    common: dict[str, Any],
    as_json: bool,
) -> None:
    """With progress on stderr, so that stdout holds the result alone."""
    import transformers

    from depthroute.diagnostics import record, trace
    from depthroute.errors import ConfigError
    from depthroute.train.launch import Request
    from depthroute.train.loop import Interrupted

    check_resume(resume)
    is_many = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if out is None and (resume == "auto" or is_many):
        why = "--resume auto continues" if resume == "auto" else "several processes share"
        raise ConfigError(f"{why} the run in --out; name it")
    out = out or Path("runs") / f"{command}-{datetime.now():%Y%m%d-%H%M%S}"
    is_main = os.environ.get("RANK", "0") == "0"
    transformers.utils.logging.disable_progress_bar()  # ours is the one bar
    aside = notes(quiet=not is_main)
    with Watching(aside) as watching:
        request = Request(
            data,
            out,
            resume=resume == "auto",
            changes=changes,
            watch=watching.watch(),
            look=lambda model, tokens: record(trace(model, tokens, gradients=True)),
            **common,
        )
        try:
            outcome = start(request)
        except Interrupted as stopped:
            watching.end()
            aside.print(f"stopped after step {stopped.step}, saved; resume with:")
            aside.print(f"  {resume_command(out)}")
            raise typer.Exit(128 + stopped.signal) from None
    if not is_main:
        return
    if as_json:
        print_json(outcome)
        return
    console = output()
    best = outcome["best"]  # none where no validation gave a number
    lowest = "" if best is None else f" (best {best['loss']:.4f} after step {best['step']})"
    loss = f"{outcome['validation_loss']:.4f} nats per token"
    console.print(f"{outcome['steps']} steps, validation loss {loss}{lowest}")
    console.print(f"model: {outcome['model']}")
