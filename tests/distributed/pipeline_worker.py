"""One rank of a pipeline, started by test_pipeline.py: every case against one process, and what
it saw on disk."""

import json
import os
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import distributed
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import depthroute as dr
from depthroute.errors import DepthrouteError
from depthroute.parallel.layout import PipelineLayout
from depthroute.parallel.mesh import MeshLayout
from depthroute.parallel.pipeline import Pipeline, summed_cross_entropy
from depthroute.parallel.spread import Spread
from depthroute.parallel.world import World
from tests.distributed import mesh_cases
from tests.families import family_model
from tests.support import METHODS, disturb_routing, routed_model, tokens

RATE = 0.05
BATCH, LENGTH = 8, 9
BLOCKS = dr.RoutingConfig("attnres", block_size=2, evaluation="one_pass")
"""With one block a layer and neither state nor partial at a cut."""


@dataclass
class Case:
    method: str | dr.RoutingConfig = "delta block"
    layers: int = 8
    family: str = "llama"
    model: dict = field(default_factory=dict)
    layout: dict = field(default_factory=lambda: {"schedule": "interleaved", "chunks": 2})
    frozen: bool = False
    accumulated: bool = False
    checkpointed: bool = False
    clipped: float | None = None
    padded: bool = False
    evaluates: bool = False
    dtype: torch.dtype = torch.float64
    device: str = "cpu"
    steps: int = 1


def interleaved(chunks=2, **settings):
    return {"schedule": "interleaved", "chunks": chunks, **settings}


EACH_METHOD = {
    name: Case(name)
    for name in (
        "standard",
        "attnres full",
        "attnres block",
        "attnres two-phase",
        "delta",
        "delta block",
        "delta block reference",
        "cumulative",
        "static",
        "x0-skip learned",
        "depth attention",
        "depth attention gate",
    )
}
EACH_SCHEDULE = {
    f"{method}, {name}": Case(method, layout=layout)
    for method in ("attnres block", "depth attention stride 1")
    for name, layout in {
        "gpipe": {"schedule": "gpipe"},
        "1f1b": {"schedule": "1f1b"},
        "zero-bubble": {"schedule": "zero-bubble", "chunks": 2},
        "one chunk of zero-bubble": {"schedule": "zero-bubble"},
        "zbv": {"schedule": "zbv"},
        "without the cache": interleaved(cache=False),
        "four chunks": interleaved(4),
    }.items()
}
TIED = {"tie_word_embeddings": True}
SITUATIONS = {
    "three steps in fp32": Case(steps=3, clipped=0.1, dtype=torch.float32),
    "evaluated": Case(evaluates=True),
    "evaluated, zbv": Case(layout={"schedule": "zbv"}, evaluates=True),
    "tied": Case(model=TIED, clipped=0.1, steps=2),
    "tied, both on one rank": Case(model=TIED, layout={"schedule": "zbv"}, clipped=0.1, steps=2),
    "tied, accumulated": Case(model=TIED, accumulated=True),
    "recomputed": Case("attnres block", checkpointed=True),
    "recomputed in groups": Case("attnres two-phase", checkpointed=True),
    "padded": Case("attnres full", padded=True),
    "uneven": Case("attnres block", layout=interleaved(layers=(1, 4, 2, 1))),
    "frozen": Case(frozen=True),
    "frozen, zbv": Case("attnres full", frozen=True, layout={"schedule": "zbv"}),
    "frozen, zero-bubble": Case(frozen=True, layout={"schedule": "zero-bubble", "chunks": 2}),
    "frozen, nothing to train on the first stage": Case(
        frozen=True, layout=interleaved(layers=(1, 3, 3, 1))
    ),
    "one micro-batch": Case(layout=interleaved(micro_batches=1)),
    "gemma3": Case(family="gemma3_text"),
    "gpt2": Case(family="gpt2"),
    "neox": Case(family="gpt_neox", layout={"schedule": "zbv"}),
}
BYTES = {
    f"bytes, {chunks} chunks": Case(
        BLOCKS, layers=16, layout={"schedule": "1f1b"} if chunks == 1 else interleaved(chunks)
    )
    for chunks in (1, 2, 4)
} | {"bytes, without the cache": Case(BLOCKS, layers=16, layout=interleaved(2, cache=False))}
ON_TWO = EACH_METHOD | EACH_SCHEDULE | SITUATIONS | BYTES
ON_FOUR = {
    "four ranks": Case(layout={"schedule": "1f1b"}, model=TIED),
    "four ranks of two chunks": Case("attnres block", layout=interleaved()),
    "four ranks, zbv": Case("attnres full", layout={"schedule": "zbv"}),
    "four ranks, zero-bubble": Case(
        "depth attention stride 1", layout={"schedule": "zero-bubble", "chunks": 2}
    ),
    **BYTES,
}
SEVERAL_CHUNKS = [
    ("attnres block", interleaved(3)),
    ("attnres block", {"schedule": "zbv"}),
    ("attnres block", {"schedule": "gpipe"}),
    # of which torch cannot leave any gradient for later
    ("attnres two-phase", {"schedule": "zbv"}),
    ("attnres two-phase", {"schedule": "zero-bubble", "chunks": 2}),
    ("delta block", interleaved(4)),
    ("delta", interleaved(2, cache=False)),
    ("depth attention stride 1", interleaved(2)),
    ("x0-skip learned", interleaved(2)),
    ("standard", interleaved(2)),
]
"""Of one process."""


def build(case):
    torch.manual_seed(0)
    if case.family == "llama":
        model = routed_model(case.method, layers=case.layers, **case.model)
    else:
        base = family_model(case.family, **case.model)
        model = disturb_routing(dr.convert(base, dr.RoutingConfig("delta", num_blocks=2)))
    if case.frozen:
        model.freeze_base()
    if case.checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.to(case.device, case.dtype).train(case.checkpointed)


def batches(case, step):
    """Two, of which the second is for accumulation."""
    for part in range(1 + case.accumulated):
        seeds = (10 * step + 2 * part + i for i in (0, 1))
        ids, targets = (tokens(BATCH, LENGTH, seed=seed).to(case.device) for seed in seeds)
        arguments = {}
        if case.padded:
            lengths = torch.arange(BATCH) % 4 + LENGTH - 4
            mask = (torch.arange(LENGTH) < lengths[:, None]).long().to(case.device)
            targets, arguments = targets.where(mask > 0, -100), {"attention_mask": mask}
        yield ids, targets, arguments


def alone(case):
    """Losses, gradients and norms of every step in one process."""
    model = build(case)
    parameters = [p for p in model.parameters() if p.requires_grad]
    for step in range(case.steps):
        losses = []
        for ids, targets, arguments in batches(case, step):
            logits = model(ids, use_cache=False, **arguments).logits.flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, targets.flatten())
            loss.backward()
            losses.append(loss.item())
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        norm = torch.nn.utils.clip_grad_norm_(parameters, case.clipped or 1e9).item()
        update(parameters)
        yield losses, gradients, norm


@torch.no_grad()
def update(parameters):
    for parameter in parameters:
        if parameter.grad is not None:
            parameter -= RATE * parameter.grad
            parameter.grad = None


def run(case, ranks):
    """The same steps over the ranks: how far from one process anything was, and what was sent."""
    model = build(case)
    table = model.get_input_embeddings().weight
    embedding = next(name for name, p in model.named_parameters() if p is table)
    wanted = {"micro_batches": max(4, ranks)} | case.layout
    layout = PipelineLayout.of(model.plan, ranks=ranks, **wanted)
    pipeline = Pipeline(model, layout, device=case.device)
    found = {"losses": [], "expected": [], "norms": [], "expected_norms": [], "worst": [0.0, ""]}
    for step, (losses, gradients, norm) in enumerate(alone(case)):
        found["expected"] += losses
        for ids, targets, arguments in batches(case, step):
            found["losses"].append(pipeline.step(ids, targets, **arguments).item())
        own = {n: p.grad for n, p in pipeline.named_parameters() if p.grad is not None}
        for name, gradient in own.items():
            expected = gradients[name if name in gradients else embedding]
            far = (gradient - expected).abs().max() / (expected.abs().max() + 1e-9)
            found["worst"] = max(found["worst"], [far.item(), name])
        found["norms"].append(pipeline.clip_gradients(case.clipped or 1e9))
        found["expected_norms"].append(norm)
        found["names"], found["expected_names"] = sorted(own), sorted(gradients)
        update(list(pipeline.parameters()))
    sent = {stage: list(traffic) for stage, traffic in pipeline.traffic.items()}
    if case.evaluates:  # in between, with other shapes too, and training goes on
        ids, targets, arguments = next(iter(batches(case, 0)))
        losses = [pipeline.evaluate(ids[:, :n], targets[:, :n]).item() for n in (4, LENGTH)]
        found["evaluated"] = [losses[-1], pipeline.step(ids, targets).item()]
    per_token = model.config.hidden_size * case.dtype.itemsize
    return found | {
        "parameters": sorted(n for n, _ in pipeline.named_parameters()),
        "every_parameter": sorted(n for n, _ in model.named_parameters()),
        "embedding": embedding,
        "bytes": sent,
        "runs": case.steps * layout.micro_batches * (1 + case.accumulated),
        "tensor_bytes": BATCH // layout.micro_batches * LENGTH * per_token,
        "most_blocks": pipeline.cache.most_blocks,
        "left": len(pipeline.cache),
    }


def two_pipelines():
    """Four ranks as two pipelines of two, each with half of the batch."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipeline"))
    case = Case(model=TIED)
    ((_, gradients, _),) = alone(case)
    model = build(case)
    layout = PipelineLayout.of(model.plan, ranks=2, **case.layout)
    pipeline = Pipeline(model, layout, group=mesh.get_group("pipeline"))
    ids, targets, _ = next(iter(batches(case, 0)))
    half = slice(4 * mesh.get_local_rank("data"), 4 * mesh.get_local_rank("data") + 4)
    pipeline.step(ids[half], targets[half], num_targets=targets.numel())
    worst = 0.0
    for name, parameter in pipeline.named_parameters():
        distributed.all_reduce(parameter.grad, group=mesh.get_group("data"))
        expected = gradients[name if name in gradients else "model.embed_tokens.weight"]
        worst = max(worst, (parameter.grad - expected).abs().max().item())
    return worst


def saved(folder):
    """Losses of a pipeline that was trained and saved, of another layout that has loaded it, and of
    the whole model in one process that has."""
    case = Case(model=TIED)
    ids, targets, _ = next(iter(batches(case, 0)))
    losses = []
    for layout in (interleaved(), {"schedule": "zbv", "layers": (3, 2, 2, 1)}):
        model = build(case)
        pipeline = Pipeline(model, PipelineLayout.of(model.plan, ranks=2, **layout))
        if not losses:
            pipeline.step(ids, targets)
            update(list(pipeline.parameters()))
            save(pipeline.state_dict(), checkpoint_id=folder)
        else:
            load(pipeline.state_dict(), checkpoint_id=folder)
        losses.append(pipeline.evaluate(ids, targets).item())
    whole = build(case)
    load(whole.state_dict(), checkpoint_id=folder, no_dist=True)
    with torch.no_grad():
        logits = whole(ids, use_cache=False).logits.flatten(0, 1)
    losses.append(torch.nn.functional.cross_entropy(logits, targets.flatten()).item())
    return losses


class Sums(TorchDispatchMode):
    """The shapes of what ranks sum."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "all_reduce" in str(func):
            self.shapes.append(list(args[0].shape))
        return func(*args, **(kwargs or {}))


def sums(method):
    """Of two ranks that share every layer, in forward and in backward."""
    model = routed_model(method, layers=4)
    Spread(model, MeshLayout(dp=1, tp=2), World(distributed.get_rank(), 2))
    with Sums() as forward:
        loss = summed_cross_entropy(
            model, {"input_ids": tokens(BATCH, LENGTH), "use_cache": False}, tokens(BATCH, LENGTH)
        )
    with Sums() as backward:
        loss.backward()
    return forward.shapes, backward.shapes


def refusal(action):
    try:
        action()
    except DepthrouteError as error:
        return str(error)
    return None


def refusals(ranks):
    """Each on every rank, with nobody left waiting."""
    case = Case()
    model = build(case)
    layout = PipelineLayout.of(model.plan, ranks=ranks, **(case.layout | {"micro_batches": 4}))
    pipeline = Pipeline(model, layout)
    ids = tokens(6, LENGTH)
    wide = PipelineLayout.of(model.plan, ranks=ranks + 1, schedule="gpipe")
    other = PipelineLayout.of(METHODS["delta"].resolve(8), ranks=ranks, schedule="gpipe")
    return {
        "batch": refusal(lambda: pipeline.step(ids, ids)),
        "shape": refusal(lambda: pipeline.step(ids[:4], ids[:4, 1:])),
        "ranks": refusal(lambda: Pipeline(model, wide)),
        "plan": refusal(lambda: Pipeline(model, other)),
        "plain": refusal(lambda: Pipeline(dr.revert(build(Case("delta"))), layout)),
    }


def main(folder):
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    found = {}
    try:
        for name, case in (ON_TWO if ranks == 2 else ON_FOUR).items():
            found[name] = run(case, ranks)
        if ranks == 2:
            found["refusals"] = refusals(ranks)
            found["saved"] = saved(folder / "saved")
            found["sums"] = {method: sums(method) for method in ("standard", "delta block")}
        else:
            found["two pipelines"] = two_pipelines()
        for name, case in mesh_cases.SMALL[ranks].items():
            found[name] = mesh_cases.compared(case)
    except Exception:
        print(list(found), traceback.format_exc(), flush=True)
        os._exit(1)  # the others may be waiting for this rank for ever
    (folder / f"rank_{rank}.json").write_text(json.dumps(found))
    distributed.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)
