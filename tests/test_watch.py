"""What a run is warned of, and how many refused steps stop it."""

from __future__ import annotations

import pytest

from speechrl.faults import StepRefused
from speechrl.watch import Watch


def steps(watch: Watch, name: str, values: list[float]) -> list[float]:
    return [watch.look(step, {name: value})["train/warnings"] for step, value in enumerate(values, start=1)]


def test_a_spike_is_warned_of_once_there_is_something_to_compare_with(capsys: pytest.CaptureFixture[str]) -> None:
    noise = [1.0, 1.1, 0.9, 1.05, 0.95] * 4  # median 1, usual distance 0.05
    assert steps(Watch(0), "train/grad_norm", [*noise, 1.4, 1.6, 1.0]) == [0] * 21 + [1, 0]
    assert "step 22: train/grad_norm is 1.6, the last 21 steps had 1 +- 0.05" in capsys.readouterr().out
    assert steps(Watch(0), "train/loss", [*noise[:10], 99.0]) == [0] * 11  # too few to compare with
    assert steps(Watch(0), "train/loss", [-1.0] * 16 + [-1.3]) == [0] * 16 + [1]  # a loss may lie below 0


def test_an_entropy_that_collapses_is_warned_of_once() -> None:
    fall = [2.0] * 16 + [1.0, 0.41, 0.39, 0.1, 1.0, 0.3]
    assert steps(Watch(0), "train/entropy_nats", fall) == [0] * 18 + [1, 0, 0, 1]  # anew after it had recovered


def test_a_resumed_watch_knows_what_the_first_saw() -> None:
    lines = [{"step": i, "train/grad_norm": 1.0, "train/refused": float(i == 3), "train/loss": None} for i in range(20)]
    watch = Watch(1, lines)
    assert watch.num_refused == 1
    assert watch.look(21, {"train/grad_norm": 2.0}) == {"train/warnings": 1.0}
    with pytest.raises(StepRefused, match=r"step 22: bad\. Refused steps so far: 2, --train.max_skipped_steps 1"):
        watch.refuse(22, StepRefused("bad"))


def test_refused_steps_are_counted_up_to_their_bound() -> None:
    watch = Watch(2)
    for step in (1, 2):
        assert watch.refuse(step, StepRefused("bad")) == {"train/skipped": 1.0, "train/refused": 1.0}
    with pytest.raises(StepRefused):
        watch.refuse(3, StepRefused("bad"))


def test_a_gradient_is_not_compared_with_that_of_another_loss() -> None:
    """Steps of CTC alone have no train/loss; the first that has one starts anew."""
    watch = Watch(0)
    warnings = [watch.look(step, {"train/grad_norm": 0.1})["train/warnings"] for step in range(20)]
    warnings += [watch.look(step, {"train/grad_norm": 3.0, "train/loss": 5.0})["train/warnings"] for step in range(20)]
    assert warnings == [0] * 40
    assert watch.look(41, {"train/grad_norm": 9.0, "train/loss": 5.0}) == {"train/warnings": 1.0}
