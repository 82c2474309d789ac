import numpy as np
import pytest

from speechrl.statistics import bootstrap_interval, paired_bootstrap_p


def test_interval_of_equal_rates_is_that_rate():
    # Every utterance has 1 error in 4, whatever is drawn: 0.25, also with uneven lengths.
    assert bootstrap_interval([1, 2, 5], [4, 8, 20]) == (0.25, 0.25)


def test_interval_matches_the_binomial_one():
    # 400 utterances of 1 character, 100 of them wrong: rate 0.25, standard error sqrt(0.25 * 0.75 / 400) = 0.02165,
    # so the interval is 0.25 +- 1.96 * 0.02165 = 0.2076 .. 0.2924, up to the noise of 4000 resamples.
    low, high = bootstrap_interval([1] * 100 + [0] * 300, [1] * 400, num_resamples=4000)
    assert (low, high) == pytest.approx((0.2076, 0.2924), abs=0.004)
    wider = bootstrap_interval([1] * 100 + [0] * 300, [1] * 400, num_resamples=4000, level=0.99)
    assert wider == pytest.approx((0.25 - 2.576 * 0.02165, 0.25 + 2.576 * 0.02165), abs=0.006)


def test_it_is_a_ratio_of_sums():
    # One long clean utterance and one short bad one, in pairs: resamples give 0/200, 1/101 or 2/2, never the mean of
    # rates 0.5.
    low, high = bootstrap_interval([0, 1], [100, 1], num_resamples=200)
    assert (low, high) == (0.0, 1.0)
    assert bootstrap_interval([0, 1], [100, 1], num_resamples=200, level=0.2)[1] == pytest.approx(1 / 101)


def test_same_seed_same_interval_and_scale():
    rng = np.random.default_rng(1)
    lengths = rng.integers(1, 50, size=60)
    errors = rng.binomial(lengths, 0.2)
    assert bootstrap_interval(errors, lengths, seed=3) == bootstrap_interval(errors, lengths, seed=3)
    assert bootstrap_interval(errors, lengths, seed=3) != bootstrap_interval(errors, lengths, seed=4)
    low, high = bootstrap_interval(errors, lengths)
    assert bootstrap_interval(3 * errors, lengths) == pytest.approx((3 * low, 3 * high))


def test_resamples_without_reference_units_are_left_out():
    # Two of three utterances are silence (no reference characters): some resamples hold only those.
    assert bootstrap_interval([1, 0, 0], [2, 0, 0], num_resamples=300) == (0.5, 0.5)


def test_paired_p_of_equal_better_and_noisy_systems():
    rng = np.random.default_rng(0)
    lengths = np.full(200, 20)
    a = rng.binomial(20, 0.3, size=200)
    assert paired_bootstrap_p(a, a, lengths) == 1.0  # every resample is a tie
    # Always one error fewer: no resample shows the other sign, so the smallest p there is, 2 / 1001.
    assert paired_bootstrap_p(a + 1, a, lengths) == pytest.approx(2 / 1001)
    # +1 and -1 in equal number: no difference at all, p near 1.
    assert paired_bootstrap_p(a + np.tile([1, -1], 100), a, lengths) > 0.8
    assert paired_bootstrap_p(a, a + np.tile([1, -1], 100), lengths) > 0.8


def test_paired_p_by_the_normal_approximation():
    # Differences: 60 of +1 and 40 of -1 among 400. Sum 20, sd of a resampled sum sqrt(100 - 400 * 0.05^2) = 9.95,
    # z = 2.01, two-sided p = 0.044; ties count on both sides, which adds about 0.005.
    a = np.array([1] * 60 + [0] * 340)
    b = np.array([0] * 60 + [1] * 40 + [0] * 300)
    assert paired_bootstrap_p(a, b, np.ones(400), num_resamples=8000) == pytest.approx(0.05, abs=0.012)


@pytest.mark.parametrize("numerators, denominators", [([], []), ([1], [1, 2]), ([1, 2], [0, 0]), ([float("nan")], [1])])
def test_bad_input_is_refused(numerators, denominators):
    with pytest.raises(ValueError, match="denominator"):
        bootstrap_interval(numerators, denominators)
