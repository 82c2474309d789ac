"""What the parts did: numbers by hand, and Pearson's correlation against numpy's."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speechrl.reward.summary import summarise
from speechrl.types import Scores


def test_by_hand():
    scores = [
        Scores((1.0, 3.0), {"a": (0.0, 1.0), "b": (None, None)}),
        Scores((5.0, None), {"a": (2.0, 5.0), "b": (1.0, 1.0)}),
    ]
    found = summarise(scores)
    assert list(found) == ["", "a", "b"]
    # 1, 3, 5: mean 3, squares 4 + 0 + 4 over 3
    assert (found[""].mean, found[""].std) == (3.0, pytest.approx(math.sqrt(8 / 3)))
    assert (found[""].abstained_share, found[""].correlation) == (0.25, pytest.approx(1.0))
    # 0, 1, 2, 5: mean 2, squares 4 + 1 + 0 + 9 over 4
    assert (found["a"].mean, found["a"].std) == (2.0, pytest.approx(math.sqrt(14 / 4)))
    # with the reward: (0, 1), (1, 3), (2, 5) lie on a line; the 5 beside None is left out
    assert found["a"].correlation == pytest.approx(1.0)
    assert found["b"].abstained_share == 0.5
    assert (found["b"].mean, found["b"].std) == (1.0, 0.0)
    assert (found["b"].correlation, found["b"].group_correlation) == (None, None)


def test_a_part_that_only_tells_groups_apart_does_not_steer():
    """Between groups `level` rises with the reward, inside them it falls."""
    scores = [
        Scores((0.0, 0.1), {"level": (1.1, 1.0)}),
        Scores((10.0, 10.1), {"level": (9.1, 9.0)}),
    ]
    level = summarise(scores)["level"]
    assert level.correlation is not None and level.correlation > 0.99
    assert level.group_correlation == pytest.approx(-1.0)


def test_all_abstain_and_nothing_at_all():
    found = summarise([Scores((None, None), {"a": (None, None)})])["a"]
    assert (found.mean, found.std, found.abstained_share, found.correlation) == (None, None, 1.0, None)
    assert summarise([]) == {}


def test_a_part_that_one_group_was_not_told_of_abstains_there():
    assert summarise([Scores((1.0,), {"a": (1.0,)}), Scores((2.0, 3.0))])["a"].abstained_share == pytest.approx(2 / 3)


def test_equal_values_have_no_correlation_though_they_round():
    found = summarise([Scores((0.1, 0.7, 0.3), {"a": (0.1 + 0.2, 0.3, 0.1 + 0.2)})])["a"]
    assert (found.correlation, found.group_correlation) == (None, None)


values = st.integers(-20, 20).map(lambda n: n / 4)


@settings(deadline=None, max_examples=60)
@given(groups=st.lists(st.lists(st.tuples(values, values), min_size=2, max_size=5), min_size=1, max_size=4))
def test_correlations_are_numpys_and_do_not_see_scale_or_order(groups):
    def scored(factor: float, turned: bool) -> list[Scores]:
        rows = [group[::-1] if turned else group for group in groups]
        return [
            Scores(tuple(reward for _, reward in row), {"a": tuple(factor * value + 1 for value, _ in row)})
            for row in rows
        ]

    found = summarise(scored(1.0, False))["a"]
    flat = np.array([pair for group in groups for pair in group])
    within = np.concatenate([np.array(group) - np.mean(group, axis=0) for group in groups])
    for correlation, pairs in ((found.correlation, flat), (found.group_correlation, within)):
        if (pairs.std(axis=0) < 1e-6).any():
            assert correlation is None
        else:
            assert correlation == pytest.approx(np.corrcoef(pairs.T)[0, 1], abs=1e-9)
    other = summarise(scored(3.0, True))["a"]
    assert other.correlation == pytest.approx(found.correlation, abs=1e-9)
    assert other.group_correlation == pytest.approx(found.group_correlation, abs=1e-9)
