import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speechrl.algorithms.schedules import LR_SCHEDULES, learning_rate


def rates(name: str, steps: list[float], min_ratio: float = 0.1, warmup: float = 2) -> list[float]:
    return [learning_rate(step, 10, 4.0, warmup, min_ratio, name) for step in steps]


def test_by_hand():
    # Peak 4, warm-up 2: 4/3, 8/3, then 4 at step 2. 8 steps remain, so step 6 is half way and 10 the end.
    start = [4 / 3, 8 / 3, 4.0]
    assert rates("constant", [0, 1, 2, 6, 10]) == pytest.approx([*start, 4.0, 4.0])
    # linear: half way 1 - 0.9 / 2 = 0.55 of the peak; the end is 0.1 of it
    assert rates("linear", [0, 1, 2, 6, 10]) == pytest.approx([*start, 2.2, 0.4])
    # cosine: step 4 is a quarter: 0.1 + 0.9 (1 + cos(pi / 4)) / 2 = 0.868198 of the peak
    assert rates("cosine", [0, 1, 2, 4, 6, 10]) == pytest.approx([*start, 3.472792, 2.2, 0.4], abs=1e-6)
    assert 4 * (0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2) == pytest.approx(3.472792, abs=1e-6)


def test_without_warm_up_the_first_step_is_the_peak_and_past_the_end_the_floor_holds():
    for name in ("linear", "cosine"):
        assert rates(name, [0, 10, 25], warmup=0) == pytest.approx([4.0, 0.4, 0.4])


def test_warm_up_as_long_as_the_run():
    assert rates("linear", [0, 9, 10], warmup=10) == pytest.approx([4 / 11, 40 / 11, 0.4])


def test_a_clock_can_stand_in_for_steps():
    assert learning_rate(45.5, 90.0, 1.0, 1.0, 0.0, "linear") == pytest.approx(0.5)  # 44.5 of 89 s


def test_unknown_name_names_the_flag():
    with pytest.raises(ValueError, match=r"--actor.lr_scheduler is 'cosin'; allowed: constant, linear, cosine"):
        learning_rate(0, 1, 1.0, 0, 0.1, "cosin")


@given(name=st.sampled_from(list(LR_SCHEDULES)), total=st.integers(1, 60), share=st.floats(0, 1), floor=st.floats(0, 1))
def test_never_zero_inside_a_run_and_one_peak(name, total, share, floor):
    warmup = int(share * total)
    values = [learning_rate(step, total, 1.0, warmup, floor, name) for step in range(total)]
    assert all(0 < value <= 1 for value in values)
    rising, falling = values[: warmup + 1], values[warmup:]
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)
