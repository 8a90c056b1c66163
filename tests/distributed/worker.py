"""One rank of a small run, started by test_ranks.py: trains every case and writes what it saw."""

import json
import os
import resource
import signal
import sys
import traceback
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import depthroute as dr
from depthroute import ops, presets
from depthroute.errors import DepthrouteError
from depthroute.parallel import stored
from depthroute.parallel.world import SINGLE, joined
from depthroute.parallel.wrap import wrap
from depthroute.runs.checkpoint import Checkpoints
from depthroute.runs.directory import RunDirectory
from depthroute.train.launch import export
from depthroute.train.loop import Experiment, Interrupted
from depthroute.train.trainer import DivergenceError, Trainer
from tests.distributed.mesh_cases import SHARES_EXPERTS
from tests.training import SETTINGS, SMALL, take_steps, words

STEPS = replace(SETTINGS, steps=6, warmup_steps=0, validation_sequences=8)
CASES = {
    "one pass": (dr.RoutingConfig("delta"), {}),
    "two phases": (dr.RoutingConfig("delta", num_blocks=2, evaluation="two_phase"), {}),
    "attnres": (dr.RoutingConfig("attnres"), {}),
    "gate": (dr.RoutingConfig("delta", num_blocks=2, init="gate"), {}),
    "depth attention": (dr.RoutingConfig("depth_attention"), {}),
    "value residual": (dr.RoutingConfig("value_residual"), {}),
    "roles": (dr.RoutingConfig("attnres", value_reads=True), {}),
    "standard": (dr.RoutingConfig("standard"), {}),
    "accumulated": (dr.RoutingConfig("delta"), {"accumulation": 2}),
    "checkpointed": (dr.RoutingConfig("delta"), {"gradient_checkpointing": True}),
    "bf16": (dr.RoutingConfig("delta"), {"precision": "bf16"}),
    "regions": (dr.RoutingConfig("delta", num_blocks=2), {"compile": "aot_eager"}),
    "chunks": (dr.RoutingConfig("delta"), {"loss_chunk": 11}),
    "muon": (dr.RoutingConfig("delta"), {"optimizer": "muon", "accumulation": 2}),
}


def modes(case):
    """Muon takes whole matrices, so sharded ones are refused."""
    return ("ddp",) if case == "muon" else ("ddp", "fsdp")


def build(routing):
    torch.manual_seed(0)
    return presets.build(SMALL, routing)


def trainer(routing, changes, world, mode):
    settings = replace(STEPS, **changes)
    return Trainer(wrap(build(routing), world, mode, precision=settings.precision), settings, world)


def curve(routing, changes, world=SINGLE, mode="ddp"):
    one = trainer(routing, changes, world, mode)
    with ops.record_backends() as ran:
        results = list(take_steps(one, words()))
    return {
        "losses without logits": ran["linear_cross_entropy", "torch"],
        "losses": [r.loss for r in results],
        "norms": [r.gradient_norm for r in results],
        "tokens": [r.tokens for r in results],
        "validation": one.validate(words().validation_batches(8)),
    }


def frozen(world, mode):
    model = build(dr.RoutingConfig("delta"))
    model.freeze_base()
    one = Trainer(wrap(model, world, mode), STEPS, world)
    return {"losses": [r.loss for r in take_steps(one, words())]}


def statistics(world, mode):
    """dtypes of what the places inside a group are given of its phase 1, in bf16 training."""
    seen, boundary = set(), ops.boundary

    def spy(mix, *args):
        seen.update([] if mix.prior_lse is None else [str(mix.prior_lse.dtype)])
        return boundary(mix, *args)

    routing = dr.RoutingConfig("delta", evaluation="two_phase", group_size=3)
    preset = replace(SMALL, model=SMALL.model | {"num_hidden_layers": 3})  # a group over two layers
    settings = replace(STEPS, precision="bf16", steps=1)
    model = wrap(presets.build(preset, routing), world, mode, precision="bf16")
    ops.boundary = spy
    try:
        list(take_steps(Trainer(model, settings, world), words()))
    finally:
        ops.boundary = boundary
    return sorted(seen)


def interrupted(world, mode, folder):
    """Stopped on one rank, resumed, exported; against the same run never stopped."""
    routing = dr.RoutingConfig("delta")

    def fit(name, on_step=lambda progress: None):
        path = folder / name
        if world.is_main and not path.exists():
            RunDirectory.create(path)
        world.barrier()
        return Experiment(
            {"delta": lambda: build(routing)},
            STEPS,
            words(),
            RunDirectory(path),
            world=world,
            wrap=lambda model: wrap(model, world, mode),
            on_step=on_step,
        )

    def stop(progress):
        if progress.result.step == 2 and world.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    straight = fit("straight")
    straight()
    try:
        fit("cut", stop)()
        stopped = None
    except Interrupted as error:
        stopped = [error.signal, error.step]
    again = fit("cut")
    resumed = again.resume()
    again()
    export(again.trainer, folder / "model", checkpoint=again.checkpoints.path(6))
    world.barrier()
    inputs = words().batch(0, 0).inputs
    with torch.no_grad():
        expected = again.trainer.model.eval()(inputs).logits
        logits = dr.from_pretrained(folder / "model").eval()(inputs).logits
    read = {n: f.directory.records() for n, f in (("straight", straight), ("cut", again))}
    return {
        "stopped": stopped,
        "resumed": resumed,
        "curves": {
            name: [r["loss"] for r in records if r["event"] == "step"]
            for name, records in read.items()
        },
        "exported_difference": (logits - expected).abs().max().item(),
        "exported_tensors": sorted(load_file(folder / "model" / "model.safetensors")),
        "checkpoint": sorted(p.name for p in again.checkpoints.path(6).iterdir()),
    }


def diverged(world, mode):
    """Non-finite numbers on one rank alone stop every rank, at the same step."""
    one = trainer(dr.RoutingConfig("delta"), {}, world, mode)
    if world.rank == 1:
        weight = one.inner.model.layers[1].mlp.down_proj.weight
        with torch.no_grad():
            local = weight.to_local() if hasattr(weight, "to_local") else weight
            local.view(-1)[0] = float("nan")
    try:
        one.take_step(words().batch(0, 0, world.rank, world.size))
    except DivergenceError as error:
        return {"step": error.step, "site": error.site}
    return None


def full_disk(world, mode, folder):
    """No file may grow past 2 kB, as on a full disk: every rank is told, and goes back."""
    one = trainer(dr.RoutingConfig("delta"), {}, world, mode)
    checkpoints = Checkpoints(folder / "checkpoints", world=world)
    checkpoints.save({"one": one}, {"step": 0})
    checkpoints.wait()
    one.take_step(words().batch(0, 0, world.rank, world.size))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        checkpoints.save({"one": one}, {"step": 1})
        checkpoints.wait()
        message = None
    except DepthrouteError as error:
        message = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    checkpoints.load(checkpoints.path(0), {"one": one})
    kept = [int(path.name.removeprefix("step_")) for path in checkpoints.paths()]
    return {"message": message, "kept": kept, "completed": one.completed}


def drawn(world, folder):
    """Random numbers of two replicas' checkpoint, as replicas and as ranks that share layers."""
    one = trainer(dr.RoutingConfig("delta"), {}, world, "ddp")
    checkpoints = Checkpoints(folder / "drawn", world=world)
    torch.manual_seed(world.rank)
    checkpoints.save({"one": one}, {"step": 0})
    checkpoints.wait()
    numbers = {}
    for name, alike in (("replicas", 1), ("shares", 2)):
        checkpoints.world = replace(world, alike=alike)
        checkpoints.load(checkpoints.path(0), {"one": one})
        numbers[name] = torch.rand(2).tolist()
    return numbers


def packed(world, folder):
    """Ranks that have rows of both halves of a tensor; one process reads it whole."""
    mesh = init_device_mesh("cpu", (world.size,))
    whole = torch.arange(16.0).view(8, 2)
    place = _StridedShard(0, split_factor=2)
    part = distribute_tensor(whole, mesh, [place], src_data_rank=None)
    group = distributed.new_group(backend="gloo")
    copies = stored.Copies()
    stored.start_writing({"x": part}, folder, lambda checksums: None, group, copies).result()
    again = torch.zeros_like(part)
    stored.read_into({"x": again}, folder, group)
    return {
        "rows": part.to_local()[:, 0].tolist(),
        "again": torch.equal(again.to_local(), part.to_local()),
        "whole": torch.equal(stored.read_whole(folder, stored.about(folder))["x"], whole),
    }


def written_again(world, folder):
    """With one set of copies: the same tensors with other numbers, then one more on one rank."""
    group, mesh = distributed.new_group(backend="gloo"), init_device_mesh("cpu", (world.size,))
    copies, seen = stored.Copies(), []
    names = [f"shared {n}" for n in range(3)] + [f"of rank {world.rank}"]
    for number in range(4):
        if number == 2 and world.is_main:
            names.append("late")
        into = folder / f"written {number}"
        if world.is_main:
            into.mkdir()
        world.barrier()
        tensors = {name: torch.full((2, 3), 10.0 * number) for name in names}
        tensors["cut"] = distribute_tensor(tensors["shared 0"], mesh, [Shard(0)])
        stored.start_writing(tensors, into, lambda checksums: None, group, copies).result()
        world.barrier()
        whole = stored.read_whole(into, stored.about(into))
        seen.append({name: tensor.unique().tolist() for name, tensor in sorted(whole.items())})
    return seen


def main(folder):
    torch.set_num_threads(1)
    with joined(torch.device("cpu")) as world:
        found = {"alone": {}, "ddp": {}, "fsdp": {}}
        try:
            for name, (routing, changes) in CASES.items():
                if world.is_main:
                    found["alone"][name] = curve(routing, changes)
                for mode in modes(name):
                    found[mode][name] = curve(routing, changes, world, mode)
            if world.is_main:
                found["alone"]["frozen"] = frozen(SINGLE, "ddp")
            for mode in ("ddp", "fsdp"):
                found[mode]["frozen"] = frozen(world, mode)
                found[mode]["statistics"] = statistics(world, mode)
                found[mode]["interrupted"] = interrupted(world, mode, folder / mode)
                found[mode]["full disk"] = full_disk(world, mode, folder / mode)
                found[mode]["diverged"] = diverged(world, mode)
            if SHARES_EXPERTS:
                found["packed"] = packed(world, folder / "ddp")
            found["drawn"] = drawn(world, folder / "ddp")
            found["written again"] = written_again(world, folder / "ddp")
        except Exception:
            found["error"] = traceback.format_exc()
            (folder / f"rank_{world.rank}.json").write_text(json.dumps(found))
            raise
        (folder / f"rank_{world.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    # all results are on disk; gloo's threads were once seen to abort the interpreter's own teardown
    sys.stdout.flush()
    os._exit(0)
