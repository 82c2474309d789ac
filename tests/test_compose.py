import math

import pytest

from speechrl.reward.compose import SHAPES, clip, exponential, gate, one_minus, one_minus_tanh, weighted_sum


def test_weighted_mean_by_hand():
    parts = {"cer": [1.0, 0.5, 0.0], "fluency": [1.0, 0.0, 0.5]}
    assert weighted_sum(parts, {"cer": 3, "fluency": 1}) == [1.0, 0.375, 0.125]


def test_only_the_ratio_of_weights_matters():
    parts = {"a": [0.2, 0.9], "b": [0.7, None]}
    assert weighted_sum(parts, {"a": 0.3, "b": 0.1}) == pytest.approx(weighted_sum(parts, {"a": 3, "b": 1}))


def test_abstention_keeps_the_scale():
    parts = {"a": [1.0, 1.0, None, None], "b": [1.0, None, 0.25, None]}
    assert weighted_sum(parts, {"a": 0.9, "b": 0.1}) == [1.0, 1.0, pytest.approx(0.25), None]


def test_weight_zero_is_for_the_logs():
    assert weighted_sum({"a": [0.5, None], "b": [0.0, 1.0]}, {"a": 1, "b": 0}) == [0.5, None]


def test_no_samples():
    assert weighted_sum({"a": []}, {"a": 1}) == []


@pytest.mark.parametrize(
    ("parts", "weights", "message"),
    [
        ({"a": [1.0]}, {"a": 1, "cerr": 1}, "without a part ['cerr']"),
        ({"a": [1.0], "b": [1.0]}, {"a": 1}, "without a weight ['b']"),
        ({"a": [1.0], "b": [1.0, 0.0]}, {"a": 1, "b": 1}, "differ in length"),
        ({"a": [1.0]}, {"a": -1}, "weight of 'a' is -1"),
        ({"a": [1.0]}, {"a": math.nan}, "weight of 'a' is nan"),
        ({"a": [1.0, math.inf]}, {"a": 1}, "part 'a' of sample 1 is inf"),
    ],
)
def test_errors_name_the_part(parts, weights, message):
    with pytest.raises(ValueError) as caught:
        weighted_sum(parts, weights)
    assert message in str(caught.value)


def test_a_failed_gate_gives_0_and_an_abstention_stays_one():
    keywords = [0.8, 0.8, 0.8, None, None]
    language = [0.5, 0.49, None, 0.1, 1.0]
    # the bound itself passes; a condition that abstains blocks nothing; a part that abstains says nothing anyway
    assert gate(keywords, language, 0.5) == [0.8, 0.0, 0.8, None, None]
    assert gate([], [], 0.5) == []


def test_a_gated_part_keeps_its_place_in_the_weighted_mean():
    """A failed gate lowers the total; None would have left the part out and raised it."""
    cer, keywords, language = [0.6], [1.0], [0.0]
    parts = {"cer": cer, "keywords": gate(keywords, language, 0.5)}
    assert weighted_sum(parts, {"cer": 1, "keywords": 1}) == [0.3]


def test_shapes_by_hand():
    assert one_minus([0.0, 0.25, 1.0, 4.0, None]) == [1.0, 0.75, 0.0, 0.0, None]
    # tanh(0.5) = 0.4621171573, tanh(1) = 0.7615941560
    assert one_minus_tanh([0.0, 0.5, None], a=1.0) == [1.0, pytest.approx(0.5378828427), None]
    assert one_minus_tanh([0.5], a=2.0) == [pytest.approx(0.2384058440)]
    # exp(-1) = 0.3678794412
    assert exponential([0.0, 0.5, None], a=2.0) == [1.0, pytest.approx(0.3678794412), None]
    assert clip([-0.5, 0.25, 7.0, None]) == [0.0, 0.25, 1.0, None]
    assert clip([-3.0, 0.0, 3.0], low=-1.0, high=2.0) == [-1.0, 0.0, 2.0]


def test_shapes_that_fall_fall_and_stay_in_0_to_1():
    rates = [0.0, 0.1, 0.5, 1.0, 2.0, 1000.0]
    for name, shape in SHAPES.items():
        values = shape.function(rates)
        assert all(0 <= value <= 1 for value in values), name
        assert (sorted(values, reverse=True) == values and values[0] > values[-1]) == shape.falls, name
        assert shape.function([]) == []


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: one_minus([0.5, -0.1]), "value of sample 1 is -0.1; an error rate is a finite number, 0 or more"),
        (lambda: one_minus_tanh([math.nan]), "value of sample 0 is nan"),
        (lambda: exponential([math.inf]), "value of sample 0 is inf"),
        (lambda: exponential([0.5], a=0.0), "a is 0.0; it must be a finite number above 0"),
        (lambda: one_minus_tanh([0.5], a=-1.0), "a is -1.0"),
        (lambda: clip([math.nan]), "value of sample 0 is nan"),
        (lambda: clip([0.5], low=1.0, high=1.0), "low 1.0 is not below high 1.0"),
        (lambda: gate([1.0], [1.0, 0.0], 0.5), "1 values, but 2"),
        (lambda: gate([1.0], [1.0], math.nan), "at_least is nan"),
    ],
)
def test_bad_values_and_bounds_are_refused(call, message):
    with pytest.raises(ValueError) as caught:
        call()
    assert message in str(caught.value)
