"""Cases of models spread over a mesh of ranks, and how one of them is compared with one process.

A case is trained by :class:`Trainer` for three steps, with plain gradient descent in place of
AdamW, whose first steps make signs of gradients that are next to nothing.
"""

from dataclasses import dataclass, field, replace
from functools import cache

import torch
from torch import distributed
from torch.distributed.tensor import DTensor

import depthroute as dr
from depthroute.data.batches import Batch
from depthroute.parallel.mesh import MeshLayout
from depthroute.parallel.spread import Spread
from depthroute.parallel.tensor import SHARES_PACKED
from depthroute.parallel.world import SINGLE, World
from depthroute.train.settings import TrainSettings
from depthroute.train.trainer import Trainer
from tests.families import family_model
from tests.support import disturb_routing, routed_model, tokens

RATE = 0.05
BATCH, LENGTH = 16, 8
SETTINGS = TrainSettings(steps=3, batch_size=BATCH, sequence_length=LENGTH, lr=1e-3, clip=0.1)


@dataclass(frozen=True)
class Start:
    """What one process trains."""

    method: str | dr.RoutingConfig = "delta block"
    family: str = "llama"
    layers: int = 8
    is_tied: bool = False
    is_frozen: bool = False
    is_masked: bool = False
    settings: tuple = ()
    dtype: torch.dtype = torch.float64


@dataclass(frozen=True)
class Case:
    start: Start = Start()
    layout: dict = field(default_factory=dict)
    settings: tuple = ()
    """In which the ranks differ from one process, such as accumulation."""


ACCUMULATED = (("accumulation", 2),)
RECOMPUTED = (("gradient_checkpointing", True),)
SMALL = {
    2: {
        "tp2, depth attention": Case(
            Start("depth attention gate", layers=4, is_tied=True), {"tp": 2}, ACCUMULATED
        ),
        "tp2, norms of heads": Case(
            Start(dr.RoutingConfig("delta"), "qwen3", dtype=torch.float32), {"tp": 2}
        ),
        "tp2, experts": Case(
            Start(dr.RoutingConfig("delta"), "mixtral", dtype=torch.float32), {"tp": 2}
        ),
        "tp2, frozen and recomputed": Case(
            Start("attnres block", layers=4, is_frozen=True, settings=RECOMPUTED), {"tp": 2}
        ),
        "pp2, documents": Case(
            Start(layers=4, is_tied=True, is_masked=True), {"pp": 2, "chunks": 2}, ACCUMULATED
        ),
        "pp2, value reads, gradients of weights later": Case(
            Start("roles block", layers=5), {"pp": 2, "schedule": "zbv"}
        ),
        "pp2, latents that are scored, gradients of weights later": Case(
            Start(
                dr.RoutingConfig("depth_attention", init="gate"), "deepseek_v3", dtype=torch.float32
            ),
            {"pp": 2, "schedule": "zero-bubble"},
        ),
    },
    4: {
        "tp2 x pp2": Case(Start("attnres block", layers=4), {"tp": 2, "pp": 2, "chunks": 2}),
        "dp2 x pp2": Case(Start(layers=4, is_tied=True), {"dp": 2, "pp": 2}),
        "dp2 x pp2, fsdp": Case(
            Start(layers=4, is_tied=True), {"dp": 2, "pp": 2, "mode": "fsdp"}, ACCUMULATED
        ),
        "dp2 x tp2, fsdp": Case(
            Start("depth attention gate", layers=4), {"dp": 2, "tp": 2, "mode": "fsdp"}
        ),
    },
}
"""Of the whole matrix, what runs with every test; see tests/distributed/matrix.py."""


SHARES_EXPERTS = tuple(map(int, torch.__version__.split(".")[:2])) >= SHARES_PACKED
if not SHARES_EXPERTS:
    del SMALL[2]["tp2, experts"]


def settings_of(*changes):
    return replace(SETTINGS, **dict(pair for change in changes for pair in change))


def build(start):
    torch.manual_seed(0)
    if start.family == "llama":
        tied = {"tie_word_embeddings": True} if start.is_tied else {}
        # far from the start attnres amplifies what fp32 rounds, in one process too
        amount = 0.5 if start.dtype == torch.float64 else 0.1
        model = routed_model(start.method, layers=start.layers, amount=amount, **tied)
    else:
        model = disturb_routing(dr.convert(family_model(start.family), start.method))
    if start.is_frozen:
        model.freeze_base()
    return model.to(start.dtype)


def batch(start, step):
    ids, targets = (tokens(BATCH, LENGTH, seed=10 * step + i) for i in (0, 1))
    targets = targets.masked_fill(tokens(BATCH, LENGTH, seed=step + 5) % 5 == 0, -100)
    positions = (
        torch.tensor([0, 1, 2, 0, 1, 2, 3, 4]).expand(BATCH, -1) if start.is_masked else None
    )
    return Batch(ids, targets, positions)


def part_of(whole, index, count):
    return whole.split(count)[index]


@torch.no_grad()
def descend(trainer, seen):
    """In place of the optimiser's step: note the gradients, as they are clipped, and follow."""
    gradients = {}
    for name, parameter in trainer.inner.named_parameters():
        if parameter.grad is not None:
            gradient = parameter.grad
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            gradients[name] = whole.clone()
            parameter -= RATE * gradient
    seen.append(gradients)


def trained(trainer, start, part=(0, 1)):
    """Losses and norms, gradients of each step, and the loss of a validation."""
    seen = []
    trainer.optimizer.step = lambda: descend(trainer, seen)
    results = [trainer.take_step(part_of(batch(start, step), *part)) for step in range(3)]
    # other numbers of sequences than are trained on
    held_out = [
        Batch(*(None if x is None else x[:rows] for x in batch(start, 9))) for rows in (6, 3)
    ]
    return {
        "losses": [r.loss for r in results] + [trainer.validate(held_out)],
        "norms": [r.gradient_norm for r in results],
        "tokens": [r.tokens for r in results],
        "gradients": seen,
    }


@cache
def alone(start):
    model = build(start)
    table = model.get_input_embeddings().weight
    trainer = Trainer(model, settings_of(start.settings), SINGLE)
    embedding = next(name for name, p in model.named_parameters() if p is table)
    return trained(trainer, start) | {"embedding": embedding}


def spread_trainer(case):
    rank, size = distributed.get_rank(), distributed.get_world_size()
    layout = MeshLayout(**case.layout).over(size)
    world = World(rank, size, torch.device("cpu"), layout.part(rank))
    settings = settings_of(case.start.settings, case.settings)
    model = build(case.start)
    layout.check(model, settings.batch_size, settings.accumulation, settings.sequence_length)
    return Trainer(Spread(model, layout, world), settings, world)


def compared(case):
    """How far from one process anything is: JSON-ready, of this rank."""
    expected = alone(case.start)
    trainer = spread_trainer(case)
    found = trained(trainer, case.start, trainer.world.part)
    worst, names = [0.0, ""], set()
    for wanted, gradients in zip(expected["gradients"], found["gradients"], strict=True):
        names |= set(gradients)
        # rounding in fp32 is of the size of what is summed, so of the largest gradient there is
        largest = max(gradient.abs().max() for gradient in wanted.values())
        floor = 1e-6 if case.start.dtype == torch.float64 else largest
        for name, gradient in gradients.items():
            target = wanted[name if name in wanted else expected["embedding"]]
            far = (gradient - target).abs().max() / (target.abs().max() + floor)
            worst = max(worst, [far.item(), name])
    pipeline = trainer.model.pipeline
    return {
        "worst": worst,
        "losses": [found["losses"], expected["losses"]],
        "norms": [found["norms"], expected["norms"]],
        "tokens": [found["tokens"], expected["tokens"]],
        "names": sorted(names),
        "expected names": sorted(expected["gradients"][0]),
        "left": 0 if pipeline is None else len(pipeline.cache),
    }


def budget(case):
    return 1e-9 if case.start.dtype == torch.float64 else 1e-5


def faults(ranks, budget):
    """What is wrong with what the ranks saw of one case; nothing, if it equals one process."""
    wrong = []
    for number, rank in enumerate(ranks):
        if rank["worst"][0] > budget:
            wrong.append(f"rank {number}: gradient of {rank['worst'][1]} off by {rank['worst'][0]}")
        for name in ("losses", "norms", "tokens"):
            found, expected = rank[name]
            far = max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(found, expected, strict=True))
            if not far <= max(budget, 1e-6):
                wrong.append(f"rank {number}: {name} {found}, not {expected}")
        if rank["left"]:
            wrong.append(f"rank {number}: {rank['left']} blocks are left in the cache")
    missing = set(ranks[0]["expected names"]) - {n for rank in ranks for n in rank["names"]}
    return wrong + ([f"nobody has a gradient of {sorted(missing)}"] if missing else [])
