"""Which groups a filter keeps."""

from __future__ import annotations

import pytest

from speechrl.algorithms.filters import difficulty, judge
from speechrl.types import Scores


def test_difficulty_by_hand():
    assert difficulty(Scores((0.0, 0.5, None, 1.0)), None) == 0.5
    assert difficulty(Scores((0.0, 0.5, None, 1.0)), 0.5) == pytest.approx(2 / 3)
    assert difficulty(Scores((None, None)), None) is None
    # the reward's own scores go before its rewards
    assert difficulty(Scores((5.0, 7.0), filter_scores=(0.0, 1.0)), None) == 0.5
    assert difficulty(Scores((5.0, 7.0), filter_scores=(None, None)), None) is None


def test_bounds_are_excluded_and_said_before_spread():
    means = [0.0, 0.1, 0.2, 0.5, 0.8, 0.9, 1.0]
    scores = [Scores((mean, mean)) for mean in means]
    spread = [False, True, True, True, True, True, False]
    wanted = ["too_hard", "too_hard", "too_hard", "kept", "too_easy", "too_easy", "too_easy"]
    assert judge(scores, spread, (0.2, 0.8)) == wanted
    # six times 0.8 has the mean 0.7999999999999999 where sums are not compensated (before Python 3.12)
    assert judge([Scores((0.8,) * 6)], [True], (0.2, 0.8)) == ["too_easy"]


def test_without_a_range_only_spread_counts():
    scores = [Scores((0.97, 0.97)), Scores((0.0, 1.0)), Scores((None, None))]
    assert judge(scores, [False, True, False], None) == ["no_spread", "kept", "no_spread"]
    assert judge(scores[2:], [False], (0.0, 1.0)) == ["no_spread"]  # has no mean to be hard or easy


def test_a_pass_share_of_3_to_6_in_8():
    scores = [Scores((0.95,) * passed + (0.7,) * (8 - passed)) for passed in range(9)]
    wanted = ["too_hard"] * 3 + ["kept"] * 4 + ["too_easy"] * 2
    assert judge(scores, [True] * 9, (0.3, 0.8), pass_score=0.9) == wanted
    # their means lie between 0.7 and 0.95
    assert judge(scores, [True] * 9, (0.3, 0.8)) == ["kept"] * 4 + ["too_easy"] * 5
