"""`depthroute convert`: a pretrained checkpoint to a routed one, with its proof of identity."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from depthroute.cli.app import AsJson, TrustRemoteCode, app
from depthroute.cli.terminal import notes, output, print_json

Base = Annotated[str, typer.Option(help="Folder or hub id of a Hugging Face causal LM.")]
Method = Annotated[str, typer.Option(help="attnres, delta, x0_skip, depth_attention or standard.")]
NumBlocks = Annotated[int | None, typer.Option(help="Blocks; left out, one source per sublayer.")]
BlockSize = Annotated[int | None, typer.Option(help="Sublayers per block, instead of blocks.")]
Init = Annotated[
    str | None,
    typer.Option(help="complete, centered, gate, paper or reference; left out, an identity."),
]
RoutingSettings = Annotated[
    list[str] | None,
    typer.Option("--routing", help="More routing settings, key=value. Repeatable."),
]

TOLERANCE = 1e-3
Tolerance = Annotated[
    float | None,
    typer.Option(help="Largest logit difference that is accepted; left out, 0.001."),
]

PROBE = (
    "The residual stream of a Transformer adds what every layer found to what all layers before "
    "it found. Routing over depth lets each layer choose among those contributions instead."
)
"""Measured on when no text is given: short, and in every tokenizer's reach."""


def routing_config(
    method: str,
    num_blocks: int | None,
    block_size: int | None,
    init: str | None,
    assignments: list[str] | None,
) -> Any:
    """A RoutingConfig from command-line options."""
    from depthroute.cli.options import assigned, refuse_twice
    from depthroute.config import RoutingConfig

    options = {"num_blocks": num_blocks, "block_size": block_size, "init": init}
    settings = assigned(assignments, "--routing")
    settings = refuse_twice(settings, {"method": method} | options, "--routing")
    return RoutingConfig.named(settings.pop("method"), **settings)


def chosen_tolerance(tolerance: float | None, allow_drift: bool) -> float | None:
    """The largest logit difference; None accepts any."""
    from depthroute.checks import check_number
    from depthroute.errors import ConfigError

    if allow_drift and tolerance is not None:
        raise ConfigError(
            f"--allow-drift accepts any difference, so --tolerance {tolerance:g} would be ignored; "
            "give one of them"
        )
    check_number("--tolerance", tolerance, least=0.0, optional=True)
    return None if allow_drift else TOLERANCE if tolerance is None else tolerance


@app.command(
    epilog="Example: `depthroute convert --base ./SmolLM2-135M --method delta --num-blocks 4 "
    "--out ./smol-delta --text wiki.txt`"
)
def convert(
    base: Base,
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    method: Method = "delta",
    num_blocks: NumBlocks = None,
    block_size: BlockSize = None,
    init: Init = None,
    routing: RoutingSettings = None,
    text: Annotated[
        Path | None, typer.Option(help="Text to measure the identity on; left out, a sentence.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, help="How many tokens of it.")] = 512,
    tolerance: Tolerance = None,
    allow_drift: Annotated[
        bool, typer.Option("--allow-drift", help="Write the model whatever the difference.")
    ] = False,
    adapter_only: Annotated[
        bool, typer.Option("--adapter-only", help="Write the routing parameters alone.")
    ] = False,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Convert a checkpoint and print how far its logits moved on real text.

    The measurement is made in fp32 on the weights as stored; above the tolerance nothing is
    written. The checkpoint keeps its own dtype.
    """
    from depthroute.models.command import convert_checkpoint

    settings = routing_config(method, num_blocks, block_size, init, routing)
    largest = chosen_tolerance(tolerance, allow_drift)
    with notes().status("converting"):
        result = convert_checkpoint(
            base,
            out,
            settings,
            text=PROBE if text is None else read_text(text),
            num_tokens=tokens,
            tolerance=largest,
            adapter_only=adapter_only,
            trust_remote_code=trust_remote_code,
        )
    if as_json:
        print_json(asdict(result))
        return
    console = output()
    console.print(f"init: {result.init} ({result.reason})")
    console.print(str(result.identity))
    console.print(
        f"{result.num_routing_parameters:,} routing parameters at {result.num_sites} sites, "
        f"{100 * result.num_routing_parameters / result.num_parameters:.4f}% of "
        f"{result.num_parameters:,}"
    )
    console.print(f"written: {result.path}")


@app.command(epilog="Example: `depthroute identity --base ./SmolLM2-135M --routed ./smol-delta`")
def identity(
    base: Base,
    routed: Annotated[str, typer.Option(help="Folder of the routed model or adapter.")],
    text: Annotated[
        Path | None, typer.Option(help="Text to measure on; left out, a sentence.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, help="How many tokens of it.")] = 512,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """How far a routed model's logits are from its base's, in fp32."""
    from depthroute.models.command import compare_checkpoints

    report = compare_checkpoints(
        base,
        routed,
        text=PROBE if text is None else read_text(text),
        num_tokens=tokens,
        trust_remote_code=trust_remote_code,
    )
    if as_json:
        print_json(asdict(report))
    else:
        print(report)


@app.command(epilog="Example: `depthroute revert ./smol-delta --out ./smol-plain`")
def revert(
    model: Annotated[str, typer.Argument(help="Folder of a routed model.")],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Write the plain model back; if its weights were not trained, bit for bit the original."""
    from depthroute.models.command import revert_checkpoint

    revert_checkpoint(model, out, trust_remote_code=trust_remote_code)
    output().print(f"written: {out}")


def read_text(path: Path, option: str = "--text") -> str:
    from depthroute.errors import DepthrouteError

    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DepthrouteError(f"cannot read {option} {str(path)!r}: {error}") from error
