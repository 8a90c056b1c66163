"""Real pretrained models: ``DEPTHROUTE_REAL_MODELS=dir[:dir...] pytest -m real tests/real``.

Each folder holds a plain model of a supported family with its tokenizer. docs/conversion.md has
measured results; examples/convert_real.py makes the whole table.
"""

import os

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import depthroute as dr
from tests.support import IDENTITIES

FOLDERS = [f for f in os.environ.get("DEPTHROUTE_REAL_MODELS", "").split(":") if f]
TEXT = (
    "Robert Boulter is an English film, television and theatre actor. He had a guest-starring "
    "role on the television series The Bill in 2000. This was followed by a starring role in the "
    "play Herons written by Simon Stephens, which was performed in 2001 at the Royal Court Theatre."
)
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not FOLDERS, reason="set DEPTHROUTE_REAL_MODELS to model folders"),
]


@pytest.fixture(scope="module", params=FOLDERS)
def real(request):
    model = AutoModelForCausalLM.from_pretrained(request.param, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(request.param)
    return model, tokenizer, tokenizer(TEXT, return_tensors="pt").input_ids


@pytest.mark.parametrize("name", IDENTITIES)
def test_every_identity_holds_on_real_text(real, name):
    model, _, ids = real
    routed = dr.convert(model, IDENTITIES[name], verify=ids, tolerance=1e-3)
    assert routed.identity.loss_after == pytest.approx(routed.identity.loss_before, abs=1e-5)


@torch.no_grad()
def test_generation_saving_and_reverting(real, tmp_path):
    model, tokenizer, _ = real
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    options = {"max_new_tokens": 8, "do_sample": False}
    expected = model.generate(**prompt, **options)
    routed = dr.convert(model, dr.RoutingConfig("delta", num_blocks=4))
    assert torch.equal(routed.generate(**prompt, **options), expected)
    routed.save_pretrained(tmp_path)
    loaded = dr.from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(**prompt).logits, routed(**prompt).logits)
    back = dr.revert(loaded)
    assert torch.equal(back(**prompt).logits, model(**prompt).logits)


def test_a_few_steps_of_routing_alone_lower_the_loss(real):
    model, _, ids = real
    routed = dr.convert(model, dr.RoutingConfig("delta", num_blocks=4)).train()
    routed.freeze_base()
    optimiser = torch.optim.AdamW(dr.parameter_groups(routed, lr=0.0, routing_lr=1e-2))
    losses = []
    for _ in range(6):
        loss = routed(input_ids=ids, labels=ids).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.01
