"""How a step is judged, and that replaying it changes nothing, as far as a CPU can show it."""

import math
from dataclasses import replace

import pytest
import torch
from tests import recorded, replays
from tests.training import SETTINGS, build, take_steps, words

from depthroute.data.batches import IGNORED, Batch
from depthroute.train.graphs import Hooks, update_unless
from depthroute.train.trainer import Trainer
from depthroute.train.verdict import Verdict, judged

INF, NAN = math.inf, math.nan


@pytest.fixture
def make(monkeypatch):
    recorded.use(monkeypatch)

    def made(settings, *, replays, method="delta"):
        trainer = Trainer(build(method), settings)
        return recorded.replaying(trainer) if replays else trainer

    return made


@pytest.mark.parametrize(
    ("loss", "norm", "most", "is_bad"),
    [
        (2.0, 1.0, INF, False),
        (2.0, 1.0, 2.0, False),
        (2.0, 1.0, math.nextafter(2.0, 0.0), True),
        (-2.0, 0.0, -1.0, False),
        (INF, 1.0, INF, True),
        (-INF, 1.0, INF, True),
        (NAN, 1.0, INF, True),
        (2.0, INF, INF, True),
        (2.0, NAN, INF, True),
        (NAN, NAN, 1.0, True),
    ],
)
@pytest.mark.parametrize("is_given", [False, True])
def test_a_step_is_bad_if_a_number_is_none_or_the_loss_above_what_it_may_be(
    loss, norm, most, is_bad, is_given
):
    limit = torch.tensor(most, dtype=torch.float64) if is_given else most
    tokens = torch.tensor(2**24 + 1)
    found = Verdict.read(judged(torch.tensor(loss), torch.tensor(norm), tokens, limit))
    assert found.is_bad is is_bad
    assert found.tokens == 2**24 + 1
    assert (found.loss, found.norm) == pytest.approx((loss, norm), nan_ok=True)


@pytest.mark.parametrize("is_bad", [False, True])
def test_an_update_is_adamws_own_or_none_at_all(is_bad):
    trainers = [Trainer(build(), SETTINGS) for _ in range(2)]
    for trainer in trainers:
        trainer.take_step(words().batch(0, 0))
        trainer._gradients([words().batch(1, 0)], torch.tensor(64))
    mine, other = trainers
    before = replays.held(mine)
    groups = mine.optimizer.param_groups
    rates = torch.tensor([3e-3 + number for number in range(len(groups))], dtype=torch.float64)
    settings = [dict(group) for group in groups]
    update_unless(torch.tensor(float(is_bad)), mine.optimizer, rates)
    assert [dict(group) for group in groups] == settings
    assert not hasattr(mine.optimizer, "found_inf")
    if is_bad:
        replays.assert_same(replays.held(mine), before)
        return
    for group, rate in zip(other.optimizer.param_groups, rates.float().tolist(), strict=True):
        group["lr"] = rate
    other.optimizer.step()
    replays.assert_same(replays.held(mine), replays.held(other))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"accumulation": 2, "precision": "bf16"},
        {"clip": 1e-3, "schedule": "wsd"},
        {"optimizer": "muon"},
        {"loss_chunk": 0, "routing_lr": 3e-2},
    ],
    ids=str,
)
def test_replayed_steps_are_the_steps(make, changes):
    settings = replace(SETTINGS, **changes)
    # sums in another order differ by an ulp of fp32, which turns roundings to bf16 over
    budget = 2**-8 if settings.precision == "bf16" else 1e-5
    mine, other = (make(settings, replays=is_replayed) for is_replayed in (True, False))
    for found, expected in zip(take_steps(mine, words()), take_steps(other, words()), strict=True):
        replays.assert_near(found, expected, budget=budget)
    assert mine.is_replayed
    assert [part.graph.replays for part in mine.graphs._captured.values()] == [9] * (
        settings.accumulation
    )
    updates = [ending.updating.replays for ending in mine.graphs._endings.values()]
    assert updates == ([] if settings.optimizer == "muon" else [9])
    # AdamW divides by the gradient's own size: what turns over moves an element by its rate
    near = {"rtol": 1e-4, "atol": 1e-6 if budget < 2**-8 else settings.lr / 10}
    for one, another in zip(mine.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(one, another, **near)


@pytest.mark.parametrize("policy", ["stop", "skip"])
@pytest.mark.parametrize("reason", replays.BAD)
def test_a_bad_replayed_step_changes_nothing_and_says_why(make, reason, policy):
    replays.check_a_bad_step(make, reason, policy)


def test_a_loaded_state_is_not_that_of_an_update_captured_before(make):
    replays.check_a_loaded_state(make)


def test_rates_and_settings_of_the_optimiser_may_change_between_steps(make):
    replays.check_other_settings_of_the_optimiser(make)


def test_hooks_of_any_kind_are_called(make):
    replays.check_hooks(make)


def test_parts_of_other_sizes_add_to_the_gradients_of_their_own_step(make):
    """Five sequences in parts of three and two, and four in parts of two and two."""
    settings = replays.settings(accumulation=2)
    mine, other = (make(settings, replays=is_replayed) for is_replayed in (True, False))
    for step in range(8):
        one, another = words().batch(step, 0), words().batch(step + 50, 0)
        longer = Batch(*(torch.cat([a, b[:1]]) for a, b in zip(one[:2], another[:2], strict=True)))
        batch = longer if step % 2 else one
        replays.assert_near(mine.take_step(batch), other.take_step(batch), budget=1e-5)
    assert mine.is_replayed and len(mine.graphs._captured) == 4


def test_targets_are_counted_at_every_step(make):
    settings = replays.settings()
    mine, other = (make(settings, replays=is_replayed) for is_replayed in (True, False))
    for step in range(7):
        batch = words().batch(step, 0)
        batch.targets[0, : 2 * step] = IGNORED
        found = mine.take_step(batch)
        assert found.tokens == 64 - 2 * step
        replays.assert_near(found, other.take_step(batch), budget=1e-5)


def test_the_update_is_queued_before_the_verdict_is_waited_for_and_not_before_it_is_read(
    make, monkeypatch
):
    trainer = make(replays.settings(), replays=True)
    for step in range(5):
        trainer.take_step(words().batch(step, 0))
    (ending,) = trainer.graphs._endings.values()
    names = {ending.judging: "judge", ending.updating: "update"}
    order, replay = [], recorded.Graph.replay

    def noted(graph):
        order.append(names.get(graph, "gradients"))
        replay(graph)

    monkeypatch.setattr(recorded.Graph, "replay", noted)
    monkeypatch.setattr(recorded.Event, "record", lambda *_: order.append("mark"))
    monkeypatch.setattr(recorded.Event, "synchronize", lambda *_: order.append("wait"))
    trainer.take_step(words().batch(5, 0))
    assert order == ["gradients", "judge", "mark", "update", "wait"]


def test_a_hook_in_place_of_another_is_noticed():
    """Their number is the same."""
    model = build()
    module = model.model.norm
    first = module.register_forward_hook(lambda *_: None)
    hooks = Hooks(model)
    assert not hooks.have_changed()
    first.remove()
    assert hooks.have_changed()
    module.register_forward_hook(lambda *_: None)
    assert hooks.have_changed()


def test_a_hook_that_records_outputs_for_whoever_asks_is_none_of_a_steps():
    """Transformers leaves it where it is."""
    model = build().eval()
    hooks = Hooks(model)
    model(torch.ones(1, 4, dtype=torch.long), output_hidden_states=True, output_attentions=True)
    assert any(module._forward_hooks for module in model.modules())
    assert not hooks.have_changed()


def test_which_parameters_are_trained_may_change_between_replayed_steps(make):
    """Their number stays the same."""
    found = []
    for is_replayed in (True, False):
        trainer = make(replays.settings(), replays=is_replayed)
        layers = trainer.inner.model.layers
        one, other = (layers[n].mlp.down_proj.weight for n in (0, 1))
        other.requires_grad_(False)
        for step in range(6):
            trainer.take_step(words().batch(step, 0))
        one.requires_grad_(False), other.requires_grad_(True)
        before = one.detach().clone(), other.detach().clone()
        for step in range(6, 9):
            trainer.take_step(words().batch(step, 0))
        assert trainer.is_replayed is is_replayed
        assert torch.equal(one, before[0]) and not torch.equal(other, before[1])
        found.append([p.detach().clone() for p in trainer.inner.parameters()])
    for mine, plain in zip(*found, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-4, atol=1e-6)


def test_the_end_of_a_plain_step_reads_its_device_once(monkeypatch):
    """Whatever is read is waited for."""
    trainer = Trainer(build(), SETTINGS)
    batch = words().batch(0, 0)
    trainer.take_step(batch)
    total = trainer._gradients([batch], batch.counted())
    reads = []
    for name in ("item", "tolist", "__bool__", "__float__", "__int__"):
        original = getattr(torch.Tensor, name)

        def counted(tensor, original=original, name=name):
            reads.append(name)
            return original(tensor)

        monkeypatch.setattr(torch.Tensor, name, counted)
    trainer._finish(total, batch.counted())
    assert reads == ["tolist"]
