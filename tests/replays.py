"""What must be true of steps that are replayed, wherever: on a CUDA device, and on the CPU as
:mod:`tests.recorded` replays them."""

import copy
import re
from dataclasses import replace

import pytest
import torch

from depthroute.data.batches import Batch
from depthroute.train.graphs import WARM_UP
from depthroute.train.trainer import LEAST_RECENT, DivergenceError
from tests.training import SETTINGS, words

GOOD = 2 * LEAST_RECENT
"""Steps before a bad one: some are replayed, and enough is learned to call a loss a spike."""
HUGE = 1e25


def settings(**changes):
    return replace(SETTINGS, steps=3 * GOOD, **changes)


def distinct(step):
    """A batch in which no token comes twice: nothing is added up in an order of chance."""
    order = torch.randperm(256, generator=torch.Generator().manual_seed(step))
    return Batch(order[:64].view(4, 16), order[64:128].view(4, 16))


def held(trainer):
    """Parameters, moments and counts of steps, as they are now."""
    state = trainer.optimizer.state
    return {
        name: [p.detach().clone(), *(x.clone() for x in state[p].values())]
        for name, p in trainer.inner.named_parameters()
    }


def assert_same(found, expected):
    for name, tensors in found.items():
        assert all(map(torch.equal, tensors, expected[name])), name


def assert_near(result, expected, budget=1e-3):
    """On a GPU sums have an order of their own every time, and steps make more of it."""
    figures = ((r.loss, r.gradient_norm, r.lr, r.tokens) for r in (result, expected))
    mine, other = figures
    assert mine == pytest.approx(other, rel=budget)
    assert result.skipped == expected.skipped


def a_weight_that_is_infinite(trainer, batch):
    trainer.inner.model.layers[1].mlp.down_proj.weight.view(-1)[0] = float("inf")
    return batch


def a_gradient_too_large_for_its_norm(trainer, batch):
    """Of a matrix that adds nothing to the loss."""
    trainer.inner.model.layers[0].mlp.up_proj.weight.mul_(HUGE)
    trainer.inner.model.layers[0].mlp.down_proj.weight.zero_()
    return batch


def a_spike(trainer, batch):
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(128, 256, batch.targets.shape, generator=generator)
    return Batch(batch.inputs, targets)


BAD = {
    "loss is (nan|inf).* first in parameter model.layers.1.mlp": a_weight_that_is_infinite,
    "the gradient norm is inf": a_gradient_too_large_for_its_norm,
    "loss is .* above the recent median": a_spike,
}


def check_a_bad_step(make, reason, policy):
    """Nothing changes, what is said is what a plain trainer says, and the next step is its own.

    ``make`` gives a trainer with some settings, replaying or not.
    """
    options = settings(spike=1.0, on_bad_step=policy)
    trainers = [make(options, replays=replays) for replays in (True, False)]
    said = []
    for trainer in trainers:
        for step in range(GOOD):
            assert trainer.take_step(words().batch(step, 0)).skipped is None
        before, recent = held(trainer), list(trainer.recent)
        kept = copy.deepcopy(trainer.inner.state_dict())
        with torch.no_grad():
            batch = BAD[reason](trainer, words().batch(GOOD, 0))
        spoilt = held(trainer)
        if policy == "stop":
            with pytest.raises(DivergenceError, match=reason) as caught:
                trainer.take_step(batch)
            said.append(str(caught.value))
        else:
            said.append(trainer.take_step(batch).skipped)
        assert all(p.grad is None for p in trainer.inner.parameters())
        assert_same(held(trainer), spoilt)
        trainer.inner.load_state_dict(kept)
        assert_same(held(trainer), before)
        assert list(trainer.recent) == recent
        assert trainer.completed == GOOD + (policy == "skip")
    assert trainers[0].is_replayed and not trainers[1].is_replayed
    assert _words(said[0]) == _words(said[1])
    assert re.search(reason, said[0])
    for step in range(GOOD + 1, GOOD + 4):
        mine, other = (trainer.take_step(words().batch(step, 0)) for trainer in trainers)
        assert_near(mine, other)
        assert mine.skipped is None and trainers[0].is_replayed
    (ending,) = trainers[0].graphs._endings.values()
    assert ending.is_valid


def _words(text):
    """Without the numbers, whose last digits may differ."""
    return [word for word in text.split() if not any(c.isdigit() for c in word)]


def check_a_loaded_state(make):
    """The update that was captured before is not made with it."""
    trainers = [make(settings(), replays=replays) for replays in (True, False)]
    for trainer in trainers:
        for step in range(6):
            trainer.take_step(words().batch(step, 0))
        saved = copy.deepcopy(trainer.optimizer.state_dict())
        for step in range(6, 9):
            trainer.take_step(words().batch(step, 0))
        trainer.optimizer.load_state_dict(saved)
    (before,) = trainers[0].graphs._endings.values()
    assert not before.is_valid
    for step in range(9, 12):
        assert_near(*(trainer.take_step(words().batch(step, 0)) for trainer in trainers))
        assert trainers[0].is_replayed
    (after,) = trainers[0].graphs._endings.values()
    assert after is not before and after.is_valid
    counts = {float(s["step"]) for t in trainers for s in t.optimizer.state.values()}
    assert counts == {9.0}


def check_other_settings_of_the_optimiser(make):
    """A rate is given to a captured update, and a weight decay is part of it."""
    trainers = [make(settings(), replays=replays) for replays in (True, False)]
    for step in range(12):
        if step == 7:
            for trainer in trainers:
                for group in trainer.optimizer.param_groups:
                    group["peak_lr"] *= 5
                    group["weight_decay"] = 3.0
        mine, other = (trainer.take_step(words().batch(step, 0)) for trainer in trainers)
        assert_near(mine, other)
    assert trainers[0].is_replayed
    pairs = zip(*(trainer.inner.parameters() for trainer in trainers), strict=True)
    for one, another in pairs:
        torch.testing.assert_close(one, another, rtol=1e-3, atol=1e-4)


def check_hooks(make):
    """Whatever is there now and was not at first, or no longer, ends the replaying until it is as
    it was."""
    trainer, steps = make(settings(), replays=True), iter(range(99))

    def is_replayed():
        trainer.take_step(words().batch(next(steps), 0))
        return trainer.is_replayed

    def note(*_):
        called.append(1)

    module, called = trainer.inner.model.layers[0].mlp.down_proj, []
    assert [is_replayed() for _ in range(5)] == [False] * WARM_UP + [True] * (5 - WARM_UP)
    for register in (
        module.register_forward_hook,
        module.register_forward_pre_hook,
        module.register_full_backward_hook,
        module.register_full_backward_pre_hook,
        torch.nn.modules.module.register_module_forward_hook,
        module.weight.register_hook,
        module.weight.register_post_accumulate_grad_hook,
    ):
        handle = register(note)
        called.clear()
        assert not is_replayed() and called, register
        handle.remove()
        called.clear()
        assert is_replayed() and not called, register
