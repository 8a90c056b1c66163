"""A run looked at from Python: what it found, its curves, its figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from depthroute import files
from depthroute.diagnostics import plots
from depthroute.diagnostics.finding import finding
from depthroute.diagnostics.report_data import collect


class Run:
    """What a directory of `depthroute train`, `finetune` or `compare` holds; it is only read."""

    def __init__(self, path: str | Path) -> None:
        self.path = files.at_home(path)
        self.data = collect([self.path])

    @property
    def config(self) -> dict[str, Any]:
        return self.data["runs"][0]["config"]

    @property
    def summary(self) -> dict[str, Any]:
        return self.data["runs"][0]["summary"]

    @property
    def methods(self) -> list[str]:
        return [series["label"] for series in self.data["series"]]

    @property
    def finding(self) -> str:
        """What was found and how sure that is, in a sentence or two."""
        return finding(self.data)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}: {', '.join(self.methods)})\n{self.finding}"

    def to_frame(self) -> Any:
        """A pandas table: a row a method and validated step."""
        rows = [
            {"method": series["label"], "step": step, "tokens": tokens, "loss": mean, "spread": s}
            for series in self.data["series"]
            for step, tokens, mean, s in zip(
                *(series["validation"][key] for key in ("steps", "tokens", "mean", "spread")),
                strict=True,
            )
        ]
        columns = ["method", "step", "tokens", "loss", "spread"]
        return plots.optional("pandas").DataFrame(rows, columns=columns)

    def plot(self) -> Any:
        """The loss curves, as a matplotlib figure."""
        return plots.loss_curves(self.data)
