import json

import pytest

from depthroute import presets
from depthroute.errors import ConfigError
from depthroute.train.optim import build_optimizer, cosine, rate_factor, set_rates, wsd
from depthroute.train.settings import TrainSettings, from_preset


def settings(**changes):
    values = {"steps": 100, "batch_size": 2, "sequence_length": 8, "lr": 1e-2, "min_lr": 1e-3}
    return TrainSettings(**values | {"warmup_steps": 10} | changes)


def test_settings_survive_a_trip_through_json():
    given = settings(schedule="wsd", betas=(0.8, 0.9), routing_lr=0.5, validate_every=7)
    assert TrainSettings.from_dict(json.loads(json.dumps(given.to_dict()))) == given


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, r"train.steps=0 must be a whole number of at least 1"),
        ({"batch_size": 2.5}, r"train.batch_size=2.5 must be a whole number"),
        ({"lr": float("nan")}, r"train.lr=nan must be a finite number"),
        ({"lr": "fast"}, r"train.lr='fast' must be a finite number"),
        ({"min_lr": 1.0}, r"train.min_lr=1.0 is above train.lr=0.01"),
        ({"warmup_steps": 100}, r"train.warmup_steps=100 leaves nothing of train.steps=100"),
        ({"schedule": "cosin"}, r"unknown train.schedule 'cosin'; did you mean 'cosine'"),
        ({"betas": (0.9,)}, r"train.betas=\(0.9,\) must be two numbers"),
        ({"clip": 0}, r"train.clip=0 must be a finite number greater than 0"),
        ({"weight_decay": -1}, r"train.weight_decay=-1 must be a finite number at least 0"),
        ({"accumulation": 3}, r"accumulation=3 does not divide train.batch_size=2"),
        ({"precision": "fp16"}, r"unknown train.precision 'fp16'"),
        ({"on_bad_step": "go"}, r"unknown train.on_bad_step 'go'; .*known: stop, skip"),
        ({"gradient_checkpointing": 1}, r"gradient_checkpointing=1 must be true or false"),
        ({"compile": True}, r"unknown train.compile True; known: .*inductor"),
        ({"routing_min_lr": 1.0}, r"routing_min_lr=1.0 is above the routing rate 0.01"),
        ({"spike": 0}, r"train.spike=0 must be a finite number greater than 0"),
        ({"decay_fraction": 1.5}, r"decay_fraction=1.5 .* greater than 0 and at most 1"),
        ({"decay_fraction": 0.5}, r"decay_fraction=0.5 has no meaning for schedule='cosine'"),
        ({"compile_scope": "layers"}, r"unknown train.compile_scope 'layers'; known: regions, w"),
        ({"compile_scope": "whole"}, r"compile_scope='whole' has no meaning without a compiler"),
        ({"compile": "zzz"}, r"unknown train.compile 'zzz'; known: .*inductor"),
        ({"compile": "inducter"}, r"unknown train.compile 'inducter'; did you mean 'inductor'"),
        ({"betas": (True, 0.9)}, r"each of train.betas=True must be a finite number at least 0"),
        ({"betas": (0.9, float("nan"))}, r"each of train.betas=nan must be .* and below 1"),
        ({"lr": 10**400}, r"train.lr=10000.* must be a finite number greater than 0"),
        ({"steps": 10**20}, r"train.steps=1000.* is too large; use at most 92"),
        ({"loss_chunk": -1}, r"train.loss_chunk=-1 must be a whole number of at least 0"),
        ({"steps": True}, r"train.steps=True must be a whole number of at least 1"),
    ],
)
def test_a_bad_setting_is_named_with_its_value(changes, message):
    with pytest.raises(ConfigError, match=message):
        settings(**changes)


def test_unknown_and_missing_settings_are_named():
    with pytest.raises(ConfigError, match=r"unknown training setting 'step'; did you mean 'steps'"):
        from_preset(presets.get("tiny"), {"step": 3})
    with pytest.raises(ConfigError, match=r"without batch_size, sequence_length, lr"):
        TrainSettings.from_dict({"steps": 3})


def test_a_preset_gives_its_published_settings():
    published = from_preset(presets.get("delta-7.57b"))
    assert published.tokens_per_step == 131_072
    assert (published.lr, published.min_lr, published.warmup_steps) == (3e-4, 3e-5, 500)
    assert (published.betas, published.weight_decay, published.clip) == ((0.9, 0.95), 0.1, 1.0)


def test_changes_keep_the_published_proportions():
    short = from_preset(presets.get("delta-220m"), {"steps": 1000, "lr": 3e-4})
    assert short.warmup_steps == 100
    assert short.min_lr == pytest.approx(3e-5)


def test_settings_that_were_not_published_are_asked_for():
    with pytest.raises(ConfigError, match=r"'da-360m' has no published steps, batch_size, .* lr"):
        from_preset(presets.get("da-360m"))


def test_cosine_warms_up_peaks_halves_and_ends_at_the_floor():
    def rate(step):
        return cosine(step, steps=101, warmup=20, floor=0.1)

    assert rate(0) == pytest.approx(1 / 20)
    assert rate(19) == rate(20) == 1.0
    assert rate(60) == pytest.approx(0.55)
    assert rate(100) == pytest.approx(0.1)
    assert all(rate(s) > rate(s + 1) for s in range(20, 100))


def test_wsd_warms_up_stays_and_decays_in_a_line_to_the_floor():
    def rate(step):
        return wsd(step, steps=101, warmup=10, decay=40, floor=0.0)

    assert rate(4) == pytest.approx(0.5)
    assert {rate(s) for s in range(10, 61)} == {1.0}
    assert rate(80) == pytest.approx(0.5)
    assert rate(100) == 0.0


def test_the_settings_choose_the_schedule():
    assert rate_factor(99, settings()) == pytest.approx(0.1)
    stable = settings(schedule="wsd", decay_fraction=0.2)
    assert rate_factor(50, stable) == 1.0
    assert rate_factor(99, stable) == pytest.approx(0.1)


def test_routing_has_its_own_rate_and_every_group_follows_the_schedule():
    model = presets.build("tiny")
    given = settings(routing_lr=0.5, weight_decay=0.3)
    optimizer = build_optimizer(model, given)
    groups = {group["name"]: group for group in optimizer.param_groups}
    routing = {id(p) for p in model.routing_parameters()}
    assert {id(p) for p in groups["routing"]["params"]} == routing
    assert [groups[n]["weight_decay"] for n in ("decay", "no_decay", "routing")] == [0.3, 0, 0]
    assert sum(len(g["params"]) for g in groups.values()) == len(list(model.parameters()))
    set_rates(optimizer, 50, given)
    set_rates(optimizer, 99, given)
    assert groups["decay"]["lr"] == pytest.approx(1e-3)
    assert groups["routing"]["lr"] == pytest.approx(0.05)


def test_the_routing_rate_can_end_where_the_base_rate_ends():
    """As published for fine-tuning: 5e-5 and 5e-3, both to 3e-5."""
    given = settings(lr=5e-5, routing_lr=5e-3, min_lr=3e-5, routing_min_lr=3e-5)
    optimizer = build_optimizer(presets.build("tiny"), given)
    set_rates(optimizer, 99, given)
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([3e-5] * 3)
