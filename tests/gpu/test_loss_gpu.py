"""The loss without whole logits on a real GPU: its kernel, its memory, and a step of training."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from depthroute import ops
from depthroute.train.graphs import WARM_UP
from depthroute.train.trainer import Trainer
from tests.kernels.cases import LossCase
from tests.training import SETTINGS, build, take_steps, words

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
CASES = [
    LossCase(1, 1, 64),
    LossCase(33, 1000, 96, dtype=fp32, chunk=7),
    LossCase(500, 50257, 256),
    LossCase(500, 50257, 256, dtype=fp16, bias=True, chunk=64),
    LossCase(300, 151936, 1024, chunk=128),
    LossCase(300, 151936, 1024, dtype=fp32, scale=0.125),
    LossCase(200, 256000, 128, softcap=30.0),
    LossCase(200, 4097, 128, dtype=fp32, scale=2.0, softcap=5.0, bias=True, chunk=99),
    LossCase(64, 4096, 128, all_ignored=True),
]


@pytest.fixture(autouse=True)
def exact_products(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_the_loss_keeps_the_error_budget(case: LossCase, backend):
    case.check("cuda", backend)


def test_a_step_waits_for_nothing_and_repeats_bit_for_bit():
    case = LossCase(300, 50257, 128, chunk=64)
    inputs = {name: t.requires_grad_() for name, t in case.inputs("cuda").items()}
    targets, results = case.targets("cuda"), []
    for _ in range(2):
        try:
            torch.cuda.set_sync_debug_mode("error")
            loss = ops.linear_cross_entropy(*inputs.values(), targets, chunk=case.chunk)
            results.append([loss, *torch.autograd.grad(loss, [*inputs.values()])])
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_the_logits_of_a_step_are_never_there():
    """8 x 1024 tokens of 152K words, width 1024, under autocast: beside the gradients (the head's
    in fp32) there is a chunk, and the head in bf16."""
    tokens, vocabulary, width = 8192, 151936, 1024
    hidden = torch.randn(tokens, width, device="cuda", dtype=bf16, requires_grad=True)
    weight = torch.randn(vocabulary, width, device="cuda", requires_grad=True)
    targets = torch.randint(0, vocabulary, (tokens,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.autocast("cuda", dtype=bf16):
        loss = ops.linear_cross_entropy(hidden, weight, targets, chunk=1024)
    loss.backward()
    peak = torch.cuda.max_memory_allocated() - before
    head, chunk = vocabulary * width, 1024 * vocabulary
    # forward: sum, cast head, chunk; backward: sum and its multiple. 128 MiB for cuBLAS and rows
    allowed = max(4 * head + 2 * head + 2 * chunk, 8 * head) + 6 * tokens * width + 2**27
    assert peak <= allowed
    assert allowed < 2 * tokens * vocabulary


@pytest.mark.parametrize("compiler", [None, "inductor"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_training_takes_the_steps_that_whole_logits_take(precision, compiler):
    """Calls are counted where there is no graph: what it replays, nobody calls."""

    def curve(chunk, cuda_graph):
        torch._dynamo.reset()
        changes = {"loss_chunk": chunk, "precision": precision, "compile": compiler}
        settings = replace(SETTINGS, cuda_graph=cuda_graph, **changes)
        trainer = Trainer(build().to("cuda"), settings)
        with ops.record_backends() as ran:
            losses = [r.loss for r in take_steps(trainer, words())]
        assert trainer.is_replayed is cuda_graph
        calls = WARM_UP + 1 if cuda_graph else SETTINGS.steps
        assert ran["linear_cross_entropy", "triton"] == (0 if chunk == 0 else calls)
        return losses

    budget = 1e-4 if precision == "fp32" else 0.02
    expected = curve(0, cuda_graph=False)
    for cuda_graph in (False, True):
        assert curve(7, cuda_graph) == pytest.approx(expected, rel=budget)
