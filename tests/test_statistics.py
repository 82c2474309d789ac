"""Bootstrap intervals and paired differences against hand-worked and normal-theory values."""

from __future__ import annotations

import numpy as np
import pytest

from speechrl.statistics import Difference, Interval, intervals, paired_differences


def interval(numerators, denominators, **options) -> tuple[float, float]:
    (found,) = intervals(numerators, denominators, **options)
    return found.low, found.high


def p_of(numerators_a, numerators_b, denominators, **options) -> float:
    (found,) = paired_differences((numerators_a, denominators), (numerators_b, denominators), **options)
    return found.p


def test_interval_of_equal_rates_is_that_rate():
    # Every utterance has 1 error in 4, whatever is drawn: 0.25, also with uneven lengths.
    assert interval([1, 2, 5], [4, 8, 20]) == (0.25, 0.25)


def test_interval_matches_the_binomial_one():
    # 400 utterances of 1 character, 100 of them wrong: rate 0.25, standard error sqrt(0.25 * 0.75 / 400) = 0.02165,
    # so the interval is 0.25 +- 1.96 * 0.02165 = 0.2076 .. 0.2924, up to the noise of 4000 resamples.
    found = interval([1] * 100 + [0] * 300, [1] * 400, num_resamples=4000)
    assert found == pytest.approx((0.2076, 0.2924), abs=0.004)
    wider = interval([1] * 100 + [0] * 300, [1] * 400, num_resamples=4000, level=0.99)
    assert wider == pytest.approx((0.25 - 2.576 * 0.02165, 0.25 + 2.576 * 0.02165), abs=0.006)


def test_it_is_a_ratio_of_sums():
    # One long clean utterance and one short bad one, in pairs: resamples give 0/200, 1/101 or 2/2, never the mean of
    # rates 0.5.
    assert interval([0, 1], [100, 1], num_resamples=200) == (0.0, 1.0)
    assert interval([0, 1], [100, 1], num_resamples=200, level=0.2)[1] == pytest.approx(1 / 101)


def test_same_seed_same_interval_and_scale():
    rng = np.random.default_rng(1)
    lengths = rng.integers(1, 50, size=60)
    errors = rng.binomial(lengths, 0.2)
    assert interval(errors, lengths, seed=3) == interval(errors, lengths, seed=3)
    assert interval(errors, lengths, seed=3) != interval(errors, lengths, seed=4)
    low, high = interval(errors, lengths)
    assert interval(3 * errors, lengths) == pytest.approx((3 * low, 3 * high))


def test_several_metrics_at_once_are_those_of_each():
    rng = np.random.default_rng(2)
    lengths_NM = rng.integers(1, 50, size=(30, 3))
    errors_NM = rng.binomial(lengths_NM, 0.2)
    together = intervals(errors_NM, lengths_NM, seed=5)
    assert together == [Interval(*interval(errors_NM[:, m], lengths_NM[:, m], seed=5)) for m in range(3)]


def test_resamples_without_reference_units_are_left_out():
    # Two of three utterances are silence (no reference characters): some resamples hold only those.
    assert interval([1, 0, 0], [2, 0, 0], num_resamples=300) == (0.5, 0.5)


def test_paired_p_of_equal_better_and_noisy_systems():
    rng = np.random.default_rng(0)
    lengths = np.full(200, 20)
    a = rng.binomial(20, 0.3, size=200)
    assert p_of(a, a, lengths) == 1.0  # every resample is a tie
    # Always one error fewer: no resample shows the other sign, so the smallest p there is, 2 / 1001.
    assert p_of(a + 1, a, lengths) == pytest.approx(2 / 1001)
    # +1 and -1 in equal number: no difference at all, p near 1.
    assert p_of(a + np.tile([1, -1], 100), a, lengths) > 0.8
    assert p_of(a, a + np.tile([1, -1], 100), lengths) > 0.8


def test_paired_p_by_the_normal_approximation():
    # Differences: 60 of +1 and 40 of -1 among 400. Sum 20, sd of a resampled sum sqrt(100 - 400 * 0.05^2) = 9.95,
    # z = 2.01, two-sided p = 0.044; ties count on both sides, which adds about 0.005.
    a = np.array([1] * 60 + [0] * 340)
    b = np.array([0] * 60 + [1] * 40 + [0] * 300)
    assert p_of(a, b, np.ones(400), num_resamples=8000) == pytest.approx(0.05, abs=0.012)


def test_a_difference_is_b_minus_a_with_its_interval():
    # As above: a 60/400, b 40/400; the difference is -0.05 with standard error 9.95 / 400 = 0.0249.
    a = np.array([1] * 60 + [0] * 340)
    b = np.array([0] * 60 + [1] * 40 + [0] * 300)
    (found,) = paired_differences((a, np.ones(400)), (b, np.ones(400)), num_resamples=4000)
    assert found.value == pytest.approx(-0.05)
    assert (found.low, found.high) == pytest.approx((-0.05 - 1.96 * 0.0249, -0.05 + 1.96 * 0.0249), abs=0.005)
    (back,) = paired_differences((b, np.ones(400)), (a, np.ones(400)), num_resamples=4000)
    assert (back.value, back.low, back.high) == pytest.approx((-found.value, -found.high, -found.low))
    assert back.p == found.p


def test_systems_may_differ_in_their_denominators():
    # An F1's denominator counts what a system inserted. 2/4 against 2/2 in each utterance: 0.5, whatever is drawn.
    (found,) = paired_differences(([2, 2], [4, 4]), ([2, 2], [2, 2]), num_resamples=50)
    assert found == Difference(0.5, 0.5, 0.5, 2 / 51)


def test_a_tie_up_to_rounding_is_a_tie():
    # The mean over three samples of one error in each is 0.1 + 0.2 in floats, not 0.3.
    assert p_of([0.1 + 0.2] * 5, [0.3] * 5, [1] * 5) == 1.0


@pytest.mark.parametrize("numerators, denominators", [([], []), ([1], [1, 2]), ([1, 2], [0, 0]), ([float("nan")], [1])])
def test_bad_input_is_refused(numerators, denominators):
    with pytest.raises(ValueError, match="denominator"):
        intervals(numerators, denominators)
    with pytest.raises(ValueError, match="denominator"):
        paired_differences((numerators, denominators), ([1], [1]))


def test_sets_of_other_sizes_are_no_pairs():
    with pytest.raises(ValueError, match=r"\(2, 1\) and \(1, 1\) are no pairs"):
        paired_differences(([1, 1], [1, 1]), ([1], [1]))
