"""``depthroute_sdpa`` on a CUDA device: no mask for whole sequences, block masks for documents."""

from __future__ import annotations

import pytest
import torch

import depthroute as dr
from depthroute.data.batches import Batch
from depthroute.models import attention
from depthroute.train.settings import TrainSettings
from depthroute.train.trainer import Trainer
from tests.models.test_attention_implementation import compiled, documents, is_plain
from tests.support import routed_model, tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LENGTH = 300
METHODS = {
    "standard": dr.RoutingConfig("standard"),
    "delta block": dr.RoutingConfig("delta", num_blocks=2),
    "depth attention": dr.RoutingConfig("depth_attention", init="paper"),
}


def model_of(method, implementation=attention.IMPLEMENTATION, family="qwen3", **settings):
    settings |= {"max_position_embeddings": LENGTH, "attn_implementation": implementation}
    if family == "llama":
        settings["head_dim"] = 16  # which FlexAttention needs, and qwen3 has
    model = routed_model(METHODS[method], family, layers=2, **settings)
    return model.cuda().train()


def inputs(*, packed):
    given = {"input_ids": tokens(length=LENGTH).cuda(), "use_cache": False}
    if packed:
        given["position_ids"] = documents((3, 130), (128,), length=LENGTH).cuda()
    return given


def gradients(model, run, given):
    model.zero_grad()
    logits = run(**given).logits
    (logits * torch.linspace(-1, 1, logits.numel(), device="cuda").view_as(logits)).sum().backward()
    named = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach()} | named


def assert_near(found, expected, tolerance=1e-3):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        distance = (found[name].double() - value.double()).norm()
        assert distance <= tolerance * value.double().norm().clamp_min(1e-3), name


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "documents"])
@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_it_is_the_family_s_own_attention_with_gradients(method, packed, how):
    given = inputs(packed=packed)
    model = model_of(method, "eager")
    expected = gradients(model, model, given)
    model.set_attn_implementation(attention.IMPLEMENTATION)
    torch._dynamo.reset()
    run = torch.compile(model, fullgraph=True) if how == "compiled" else model
    assert_near(gradients(model, run, given), expected)


def test_a_compiled_graph_of_documents_holds_no_dense_mask_and_one_of_whole_sequences_none():
    model = model_of("delta block")
    for packed in (False, True):
        fast, graphs = compiled(model)
        fast(**inputs(packed=packed))
        assert [is_plain(call) for call in graphs.calls[-1]] == ([] if packed else [True, True])


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("compiler", [None, "inductor"])
def test_a_bf16_step_on_documents_has_the_loss_of_a_dense_mask(
    family, checkpointing, compiler, monkeypatch
):
    ids = tokens(length=LENGTH + 1)
    batch = Batch(ids[:, :-1], ids[:, 1:], documents((3, 130), (128,), length=LENGTH))
    settings = TrainSettings(
        3, 2, LENGTH, lr=1e-3, precision="bf16", document_masking=True, compile=compiler,
        gradient_checkpointing=checkpointing,
    )  # fmt: skip
    losses = []
    for devices in ({"cuda"}, set()):
        monkeypatch.setattr(attention, "BLOCK_MASKS", devices)
        torch._dynamo.reset()
        trainer = Trainer(model_of("delta block", family=family), settings)
        losses.append([trainer.take_step(batch).loss for _ in range(3)])
    assert losses[0] == pytest.approx(losses[1], rel=5e-3)


def test_a_window_shorter_than_the_sequence_is_exact():
    from tests.families import family_model

    plain = family_model("mistral", head_dim=16, max_position_embeddings=LENGTH)
    model = dr.convert(plain, METHODS["delta block"]).cuda().train()
    model.set_attn_implementation("eager")
    given = inputs(packed=False)
    expected = gradients(model, model, given)
    model.set_attn_implementation(attention.IMPLEMENTATION)
    assert_near(gradients(model, model, given), expected)
