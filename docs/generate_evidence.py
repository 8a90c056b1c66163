"""Write docs/evidence.md and its pictures from bench/results: `python docs/generate_evidence.py`.

Run `python -m bench evidence RUN --out bench/results/evidence_NAME.json` before it.
"""

from __future__ import annotations

import results_evidence as evidence
import results_ladder as ladder
from generate_results import rendered
from results_data import ROOT

PAGE = ROOT / "docs" / "evidence.md"
PICTURES = ROOT / "docs" / "images"


def pictures() -> dict[str, str]:
    """SVG texts by file name, of all grids that were run and of the ladder that they are."""
    of_grids = {
        file: svg
        for grid in evidence.plan()["grid"]
        for file, (_, svg) in evidence.pictures(grid).items()
    }
    return of_grids | ladder.pictures()


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text()))
    drawn = pictures()
    for path in PICTURES.glob("evidence_*.svg"):
        if path.name not in drawn:
            path.unlink()
    for file, svg in drawn.items():
        (PICTURES / file).write_text(svg)
