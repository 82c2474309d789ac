import math

import pytest

from speechrl.reward.compose import weighted_sum


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
