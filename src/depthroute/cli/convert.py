"""`depthroute convert`: a pretrained checkpoint to a routed one, with its proof of identity."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from depthroute.checks import check_number
from depthroute.cli.app import AsJson, TrustRemoteCode, app
from depthroute.cli.options import RoutingOptions
from depthroute.cli.terminal import output, print_json, progress
from depthroute.errors import ConfigError, DepthrouteError

Base = Annotated[str, typer.Option(help="Folder or hub id of a Hugging Face causal LM.")]
TOLERANCE = 1e-3


@dataclass(frozen=True)
class DriftOptions:
    tolerance: Annotated[
        float | None,
        typer.Option(help="Largest logit difference that is accepted; left out, 0.001."),
    ] = None
    allow_drift: Annotated[
        bool, typer.Option("--allow-drift", help="Accept whatever difference there is.")
    ] = False

    def largest(self) -> float | None:
        """The largest logit difference; None accepts any."""
        if self.allow_drift and self.tolerance is not None:
            raise ConfigError(
                f"--allow-drift accepts any difference, so --tolerance {self.tolerance:g} would be "
                "ignored; give one of them"
            )
        check_number("--tolerance", self.tolerance, least=0.0, optional=True)
        if self.allow_drift:
            return None
        return TOLERANCE if self.tolerance is None else self.tolerance


PROBE = (
    "The residual stream of a Transformer adds what every layer found to what all layers before "
    "it found. Routing over depth lets each layer choose among those contributions instead."
)
"""Measured on when no text is given: short, and in every tokenizer's reach."""


@app.command(
    epilog="Example: `depthroute convert --base ./SmolLM2-135M --method delta --num-blocks 4 "
    "--out ./smol-delta --text wiki.txt`"
)
def convert(
    *,
    base: Base,
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    routing: RoutingOptions,
    text: Annotated[
        Path | None, typer.Option(help="Text to measure the identity on; left out, a sentence.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, help="How many tokens of it.")] = 512,
    drift: DriftOptions,
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
    chosen, largest = routing.chosen("delta"), drift.largest()
    from depthroute.models.command import convert_checkpoint

    with progress("converting"):
        result = convert_checkpoint(
            base,
            out,
            chosen,
            text=PROBE if text is None else read_text(text),
            num_tokens=tokens,
            tolerance=largest,
            adapter_only=adapter_only,
            trust_remote_code=trust_remote_code,
        )
    if as_json:
        print_json({"method": chosen.name} | asdict(result))
        return
    console = output()
    console.print(f"{chosen.name}, init: {result.init} ({result.reason})")
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

    content = PROBE if text is None else read_text(text)
    with progress("measuring"):
        report = compare_checkpoints(
            base, routed, text=content, num_tokens=tokens, trust_remote_code=trust_remote_code
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

    with progress("reverting"):
        revert_checkpoint(model, out, trust_remote_code=trust_remote_code)
    output().print(f"written: {out}")


def read_text(path: Path, option: str = "--text") -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DepthrouteError(f"cannot read {option} {str(path)!r}: {error}") from error
