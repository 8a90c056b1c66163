"""What every rank of a pipeline does one after the other, worked out without any process.

The order of a schedule is torch's own, asked for with stages that know nothing but their place. Run
through with a unit of time a layer it says how long ranks wait (the bubble), and how much of what a
stage makes is there at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch.distributed.pipelining.schedules import get_schedule_class

from depthroute.parallel.layout import PipelineLayout

FORWARD, BACKWARD = "FORWARD", "FULL_BACKWARD"
INPUTS, WEIGHTS = "BACKWARD_INPUT", "BACKWARD_WEIGHT"
"""The halves of backward, in torch's words: the gradients of inputs and those of weights."""


class Action(NamedTuple):
    kind: str
    stage: int
    micro_batch: int


class Run(NamedTuple):
    action: Action
    start: int
    end: int


def orders(layout: PipelineLayout) -> list[list[Action]]:
    """What each rank does, in its order."""
    if layout.order.most_chunks == 1:
        return [_one_chunk(layout, rank) for rank in range(layout.ranks)]
    place = {"group_rank": 0, "group_size": layout.ranks, "num_stages": len(layout.stages)}
    stages: Any = [SimpleNamespace(**place, submod=None) for _ in range(layout.chunks)]
    schedule: Any = get_schedule_class(layout.order.torch_name)(stages, layout.micro_batches)
    rows = (schedule.pipeline_order[rank] for rank in range(layout.ranks))
    return [
        [Action(a.computation_type.name, a.stage_index, a.microbatch_index) for a in row if a]
        for row in rows
    ]


def _one_chunk(layout: PipelineLayout, rank: int) -> list[Action]:
    """GPipe and 1F1B, which torch writes as loops: some forward, then in turns, then the rest."""
    count = layout.micro_batches
    ahead = count if layout.schedule == "gpipe" else min(count, layout.ranks - rank)
    actions = [Action(FORWARD, rank, m) for m in range(ahead)]
    for m in range(count):
        actions.append(Action(BACKWARD, rank, m))
        actions += [Action(FORWARD, rank, m + ahead)] * (m + ahead < count)
    return actions


def timeline(layout: PipelineLayout, *, splits_backward: bool = True) -> list[list[Run]]:
    """When each rank does what: a layer takes 1 forward and 2 backward, half of that for each half.

    Head, embedding and sending take no time. Without ``splits_backward`` the gradients of weights
    are computed with those of inputs, whatever the schedule would put off.
    """
    waiting = [iter(order) for order in orders(layout)]
    upcoming = [next(order, None) for order in waiting]
    ends: dict[Action, int] = {}
    runs: list[list[Run]] = [[] for _ in waiting]
    factors = {FORWARD: 1, BACKWARD: 2, INPUTS: 2 - splits_backward, WEIGHTS: splits_backward + 0}
    last = len(layout.stages) - 1
    while any(upcoming):
        before = len(ends)
        for rank, action in enumerate(upcoming):
            if action is None or any(need not in ends for need in _needs(action, last, ends)):
                continue
            own = runs[rank][-1].end if runs[rank] else 0
            start = max([own, *(ends[need] for need in _needs(action, last, ends))])
            ends[action] = start + factors[action.kind] * layout.layers[action.stage]
            runs[rank].append(Run(action, start, ends[action]))
            upcoming[rank] = next(waiting[rank], None)
        assert len(ends) > before, f"the schedule waits for itself at {upcoming}"
    return runs


def _needs(action: Action, last: int, ends: dict[Action, int]) -> list[Action]:
    """What must be done before."""
    kind, stage, micro_batch = action
    if kind == FORWARD:
        return [Action(FORWARD, stage - 1, micro_batch)] if stage else []
    if kind == WEIGHTS:
        return [Action(INPUTS, stage, micro_batch)]
    if stage == last:
        return [Action(FORWARD, stage, micro_batch)]
    after = [Action(k, stage + 1, micro_batch) for k in (BACKWARD, INPUTS)]
    return [action for action in after if action in ends] or after[:1]


def bubble(runs: Sequence[Sequence[Run]]) -> float:
    """The part of all ranks' time in which they wait."""
    end = max(run.end for row in runs for run in row)
    busy = sum(run.end - run.start for row in runs for run in row)
    return 1 - busy / (end * len(runs))


def most_alive(
    order: Iterable[Action], amounts: Sequence[int], *, splits_backward: bool = True
) -> int:
    """The most that is there at once on a rank, of the ``amounts`` that each stage makes of a
    micro-batch in forward and lets go of when its backward is through."""
    alive = most = 0
    ending = (BACKWARD, WEIGHTS if splits_backward else INPUTS)
    for action in order:
        if action.kind == FORWARD:
            alive += amounts[action.stage]
            most = max(most, alive)
        elif action.kind in ending:
            alive -= amounts[action.stage]
    return most


def most_cached(layout: PipelineLayout, order: Iterable[Action], sizes: dict[str, int]) -> int:
    """The most that a rank's cache holds at once, of tensors of these ``sizes``."""
    held: dict[int, int] = {}
    most = 0
    for kind, index, micro_batch in order:
        if kind != FORWARD:
            continue
        stage = layout.stages[index]
        kept = sum(sizes[name] for name in stage.keeps)
        held[micro_batch] = held.get(micro_batch, 0) + kept
        most = max(most, sum(held.values()))
        if stage.is_last_of_rank:
            del held[micro_batch]
    return most
