"""The concurrency limit: the update rule on written-out sequences, and properties that hold for any of them."""

import math
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from s3r_sglang.scheduler.aimd import AimdConfig, AimdPolicy


def limits(config, start, steps):
    policy = AimdPolicy(config)
    policy.limit = start
    return [policy.update(*step) for step in steps]


def test_the_defaults_are_the_papers():
    assert AimdConfig().model_dump() == {
        "minimum": 160,
        "maximum": 256,
        "increase": 5,
        "decrease": 0.7,
        "low_utilization": 0.8,
        "high_utilization": 0.95,
        "backlog_threshold": 3,
    }
    assert AimdPolicy(AimdConfig()).limit == 256


def test_a_rollout_from_calm_to_pressure_and_back():
    """Eq. 18 by hand: hold, fall twice (179 = floor(0.7 * 256), then 160 for 125), hold, rise, ceiling."""
    steps = [(0.5, 0), (0.85, 0), (0.96, 0), (0.96, 1), (0.9, 3), (0.79, 0), (0.1, 0)]
    assert limits(AimdConfig(), 256, steps) == [256, 256, 179, 160, 160, 165, 170]
    assert limits(AimdConfig(), 250, [(0.0, 0)] * 3) == [255, 256, 256]


def test_backlog_counts_above_its_threshold_and_not_under_low_utilization():
    assert limits(AimdConfig(), 256, [(0.9, 3), (0.9, 4)]) == [256, 179]
    assert limits(AimdConfig(), 200, [(0.79, 100)]) == [205]


def test_thresholds_themselves_hold():
    assert limits(AimdConfig(), 200, [(0.8, 0), (0.95, 3)]) == [200, 200]
    assert limits(AimdConfig(), 200, [(math.nextafter(0.8, 0), 0)]) == [205]
    assert limits(AimdConfig(), 240, [(math.nextafter(0.95, 1), 0)]) == [168]


def test_the_floor_is_that_of_the_decimal_factor():
    """0.29 * 100 is 28.999… in binary."""
    config = AimdConfig(minimum=1, decrease=0.29)
    assert limits(config, 100, [(1.0, 0)]) == [29]


def test_bounds_follow_the_slots_unless_given():
    def bounds(*arguments, **given):
        config = AimdConfig.for_slots(*arguments, **given)
        return config.minimum, config.maximum

    assert AimdConfig.for_slots(256) == AimdConfig()
    assert [bounds(slots) for slots in (1, 8, 32, 448)] == [(1, 1), (5, 8), (20, 32), (280, 448)]
    assert bounds(256, maximum=100) == (63, 100)
    assert bounds(256, minimum=200) == (200, 256)
    assert AimdConfig.for_slots(300, increase=9).increase == 9
    with pytest.raises(ValueError, match="maximum 257 exceeds the 256 requests"):
        AimdConfig.for_slots(256, maximum=257)
    with pytest.raises(ValidationError, match="minimum 200 exceeds maximum 128"):
        AimdConfig.for_slots(128, minimum=200)


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({"minimum": 257}, "minimum 257 exceeds maximum 256"),
        ({"low_utilization": 0.96}, "exceeds high_utilization 0.95"),
        ({"minimum": 0}, "greater than or equal to 1"),
        ({"increase": 0}, "greater than or equal to 1"),
        ({"decrease": 1.0}, "less than 1"),
        ({"decrease": 0.0}, "greater than 0"),
        ({"high_utilization": 1.1}, "less than or equal to 1"),
        ({"backlog_threshold": -1}, "greater than or equal to 0"),
        ({"beta": 0.5}, "Extra inputs"),
    ],
)
def test_constants_without_a_meaning_are_refused(values, fault):
    with pytest.raises(ValidationError, match=fault):
        AimdConfig(**values)


@pytest.mark.parametrize(("utilization", "backlog"), [(1.01, 0), (-0.01, 0), (math.nan, 0), (0.5, -1)])
def test_an_impossible_measurement_is_refused_and_changes_nothing(utilization, backlog):
    policy = AimdPolicy(AimdConfig())
    with pytest.raises(ValueError, match="is not in"):
        policy.update(utilization, backlog)
    assert policy.limit == 256


@st.composite
def configs(draw):
    low, high = sorted(draw(st.tuples(*[st.floats(0.01, 1.0)] * 2)))
    minimum, maximum = sorted(draw(st.tuples(*[st.integers(1, 600)] * 2)))
    return AimdConfig(
        minimum=minimum,
        maximum=maximum,
        increase=draw(st.integers(1, 50)),
        decrease=draw(st.integers(1, 99)) / 100,
        low_utilization=low,
        high_utilization=high,
        backlog_threshold=draw(st.integers(0, 20)),
    )


steps = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 40)), max_size=60)


@given(configs(), steps)
@example(AimdConfig(minimum=1, maximum=100, decrease=0.29), [(1.0, 0)])
def test_every_update_is_the_rule(config, sequence):
    """Against Eq. 18 in exact arithmetic, with the factor as it was written."""
    policy, expected = AimdPolicy(config), config.maximum
    for utilization, backlog in sequence:
        if utilization < config.low_utilization:
            expected += config.increase
        elif utilization > config.high_utilization or backlog > config.backlog_threshold:
            expected = math.floor(Fraction(str(config.decrease)) * expected)
        expected = min(max(expected, config.minimum), config.maximum)
        assert policy.update(utilization, backlog) == expected == policy.limit
        assert 1 <= config.minimum <= policy.limit <= config.maximum


@given(configs(), steps, st.integers(0, 40))
def test_recovers_additively_after_any_past(config, sequence, backlog):
    """However bad it was: under low utilisation the maximum is back after ceil(distance / δ) updates."""
    policy = AimdPolicy(config)
    for step in sequence:
        policy.update(*step)
    distance = config.maximum - policy.limit
    for _ in range(math.ceil(distance / config.increase)):
        before = policy.limit
        assert policy.update(0.0, backlog) - before in (config.increase, config.maximum - before)
    assert policy.limit == config.maximum


@given(configs(), steps)
def test_lasting_pressure_reaches_the_minimum_and_never_starves(config, sequence):
    """Each reduction is at least one request, so pressure ends at the minimum; and that admits somebody."""
    policy = AimdPolicy(config)
    for step in sequence:
        policy.update(*step)
    for _ in range(config.maximum - config.minimum):
        policy.update(1.0, config.backlog_threshold + 1)
    assert policy.limit == config.minimum >= 1


@given(steps, st.integers(1, 600))
def test_any_number_of_slots_has_a_rule(sequence, slots):
    config = AimdConfig.for_slots(slots)
    assert 1 <= config.minimum <= config.maximum == slots
    policy = AimdPolicy(config)
    assert all(config.minimum <= policy.update(*step) <= slots for step in sequence)
