import math

import pytest

from depthroute.runs.inference import PUBLISHED, Law, interval, law_for, t_quantile

TABLE = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 5: 2.5706, 9: 2.2622, 30: 2.0423, 120: 1.9799}
"""Two-sided 95%, as printed in tables."""


@pytest.mark.parametrize(("freedom", "t"), TABLE.items())
def test_quantiles_of_students_t_are_those_of_the_tables(freedom, t):
    assert t_quantile(0.95, freedom) == pytest.approx(t, abs=5e-5)


def test_quantiles_hold_for_other_confidences():
    assert t_quantile(0.99, 7) == pytest.approx(3.4995, abs=5e-5)
    assert t_quantile(0.5, 1) == pytest.approx(1.0)  # a Cauchy: tan(pi / 4)
    assert t_quantile(0.95, 2000) == pytest.approx(1.961, abs=1e-3)  # nearly normal


def test_an_interval_is_the_mean_and_t_standard_errors_either_side():
    values = [-0.2, -0.1, -0.3]
    low, high = interval(values)
    margin = 4.3026527 * 0.1 / math.sqrt(3)
    assert (low, high) == (pytest.approx(-0.2 - margin), pytest.approx(-0.2 + margin))
    assert interval([1.0]) is None


def test_a_speed_up_is_the_training_that_the_baseline_would_need():
    law = Law(floor=1.5, exponent=0.1, source="here")
    compute = 1e15

    def loss(compute):
        return 1.5 + 80 * compute**-0.1

    assert law.speed_up(loss(compute), loss(3 * compute)) == pytest.approx(3.0)
    assert law.speed_up(loss(compute), loss(compute)) == 1.0
    assert law.speed_up(1.4, 1.3) is None


def test_a_law_that_hardly_falls_gives_no_factor_beyond_all_numbers():
    law = Law(floor=0.0, exponent=1e-4, source="here")
    assert law.speed_up(4.0, 3.0) is None and law.speed_up(3.0, 4.0) is None
    assert law.speed_up(4.0, 3.9) == pytest.approx(math.exp(1e4 * math.log(4.0 / 3.9)))


def test_the_published_law_is_used_for_tokens_alone():
    assert law_for("token") is PUBLISHED and law_for("byte") is None
    assert "not fitted to this run" in PUBLISHED.source
