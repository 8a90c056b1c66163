"""Write docs/images/pipeline.svg, who sends what when: `python docs/generate_picture.py`.

Taken from a layout and its timeline, so it shows what runs.
"""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

from depthroute import RoutingConfig
from depthroute.parallel import timeline
from depthroute.parallel.layout import Hop, PipelineLayout
from depthroute.parallel.timeline import BACKWARD, FORWARD, Run

PICTURE = Path(__file__).parent / "images" / "pipeline.svg"
UNIT, LEFT, TOP, HEIGHT, GAP, LINE = 15, 64, 62, 34, 70, 21
"""Pixels: a layer's forward, the margins, a rank's row and the space below it, a line of text."""
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328; }
.small { font-size: 11px; }
.page { fill: #ffffff; }
.FORWARD { fill: #dbe9f9; } .FULL_BACKWARD { fill: #e6e6ea; }
.first.FORWARD { fill: #6aa5e8; } .first.FULL_BACKWARD { fill: #e9a35b; }
.send { stroke: #1f2328; stroke-width: 1.6; fill: none; }
.lend { stroke: #2f8f57; stroke-width: 1.8; fill: none; stroke-dasharray: 4 3; }
.number { fill: #1f2328; } .inside { fill: #ffffff; }
.tip { fill: #1f2328; } .green { fill: #2f8f57; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; } .page { fill: #0d1117; }
  .FORWARD { fill: #1c2d42; } .FULL_BACKWARD { fill: #2b2e35; }
  .first.FORWARD { fill: #2f6db5; } .first.FULL_BACKWARD { fill: #a8662a; }
  .send { stroke: #e6edf3; } .lend { stroke: #4fc483; }
  .number { fill: #e6edf3; } .inside { fill: #0d1117; }
  .tip { fill: #e6edf3; } .green { fill: #4fc483; }
}
"""


def layout() -> PipelineLayout:
    """Four blocks of two layers, one a stage."""
    plan = RoutingConfig("attnres", num_blocks=4, evaluation="one_pass").resolve(8)
    return PipelineLayout.of(plan, ranks=2, schedule="interleaved", chunks=2, micro_batches=4)


def picture(which: PipelineLayout) -> str:
    rows = timeline.timeline(which)
    runs = {run.action: (rank, run) for rank, row in enumerate(rows) for run in row}
    boxes = [_box(rank, run) for rank, row in enumerate(rows) for run in row]
    arrows, legend = [], []
    for index, hop in enumerate(which.hops):
        there, back = (
            [runs[kind, stage, 0] for stage in (index, index + 1)] for kind in (FORWARD, BACKWARD)
        )
        arrows += [_arrow(*there, index + 1), _arrow(*reversed(back), 2 * len(which.hops) - index)]
        arrows += _loans(which, index, runs)
        legend.append(_words(which, index, hop))
    top = TOP + which.ranks * (HEIGHT + GAP) - 12
    notes = [
        "Boxes are stages, numbered in the order they run: forward (blue), backward (orange, twice "
        "as long).",
        "Strong colours: the first of 4 micro-batches, which is followed here; all do the same.",
        *legend,
        "Green: not sent, but taken from the rank's cache; backward their gradients are deposited "
        "there and collected.",
    ]
    lines = [_text(16, top + LINE * i, note) for i, note in enumerate(notes)]
    width = LEFT + UNIT * max(run.end for row in rows for run in row) + 16
    height = top + LINE * len(lines)
    names = [_text(12, _y(rank) + 22, f"rank {rank}") for rank in range(which.ranks)]
    title = f"{which.order.torch_name}, 2 ranks x 2 chunks, attnres in 4 blocks of 2 layers"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        f"<title>Who sends what when: {title}</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{width}" height="{height}"/>',
        _text(12, 24, f"{title}; time to the right"),
        *(names + boxes + arrows + lines),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _y(rank: int) -> int:
    return TOP + rank * (HEIGHT + GAP)


def _x(time: float) -> float:
    return LEFT + UNIT * time


def _box(rank: int, run: Run) -> str:
    kind, stage, micro_batch = run.action
    first = "first " if micro_batch == 0 else ""
    x, width = _x(run.start), UNIT * (run.end - run.start)
    return (
        f'<rect class="{first}{kind}" x="{x:g}" y="{_y(rank)}" width="{width - 1:g}" '
        f'height="{HEIGHT}" rx="3"/>'
        + _text(x + width / 2, _y(rank) + 22, str(stage), 'text-anchor="middle"')
    )


def _arrow(start: tuple[int, Run], end: tuple[int, Run], number: int) -> str:
    """From the end of one box to the beginning of the next, numbered."""
    (rank, run), (other, after) = start, end
    is_down = other > rank
    x1, x2 = _x(run.end) - 5, _x(after.start) + 5
    y1, y2 = (_y(rank) + HEIGHT, _y(other)) if is_down else (_y(rank), _y(other) + HEIGHT)
    sign = 1 if is_down else -1
    place = 0.3 if is_down else 0.7  # of the height, so that neighbours do not meet
    x, y = x1 + (x2 - x1) * place, y1 + (y2 - y1) * place
    return (
        f'<path class="send" d="M{x1:g} {y1} L{x2:g} {y2 - 6 * sign}"/>'
        f'<path class="tip" d="M{x2:g} {y2} l-4 {-8 * sign} h8 z"/>'
        f'<circle class="number" cx="{x:g}" cy="{y:g}" r="9"/>'
        + _text(x, y + 4, str(number), 'text-anchor="middle" class="small inside"')
    )


def _loans(which: PipelineLayout, hop: int, runs: dict) -> list[str]:
    """Arcs from the box that has put something into the cache to the one that takes it."""
    stage = which.stages[hop + 1]
    if not which.hops[hop].lent:
        return []
    earlier = [s.index for s in which.on(stage.rank) if s.index < stage.index]
    (rank, start), (_, end) = runs[FORWARD, earlier[-1], 0], runs[FORWARD, stage.index, 0]
    x1, x2 = _x((start.start + start.end) / 2), _x((end.start + end.end) / 2)
    y = _y(rank) if rank == 0 else _y(rank) + HEIGHT
    bend, sign = y + (-24 if rank == 0 else 24), -1 if rank == 0 else 1
    path = f"M{x1:g} {y} C{x1:g} {bend}, {x2:g} {bend}, {x2:g} {y + 6 * sign}"
    tip = f'<path class="green" d="M{x2:g} {y} l-4 {8 * sign} h8 z"/>'
    return [f'<path class="lend" d="{path}"/>{tip}']


def _words(which: PipelineLayout, index: int, hop: Hop) -> str:
    sender, receiver = which.stages[index].rank, which.stages[index + 1].rank
    has = f" (rank {receiver} has {', '.join(hop.lent)})" if hop.lent else ""
    words = f"{index + 1}: rank {sender} sends rank {receiver} {', '.join(hop.sent)}{has}"
    return f"{words}; {2 * len(which.hops) - index}: their gradients come back"


def _text(x: float, y: float, words: str, attributes: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" {attributes}>{escape(words)}</text>'


if __name__ == "__main__":
    PICTURE.write_text(picture(layout()))
