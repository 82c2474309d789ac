"""Shares of several manifests in a batch."""

from __future__ import annotations

import pytest

from speechrl.data.mix import MixedLoader, ctc_units, largest_remainder
from speechrl.types import Utterance


def source(name: str, size: int) -> list[Utterance]:
    return [Utterance(f"{name}{index}", "turn 打开 on", prompt="x") for index in range(size)]


@pytest.mark.parametrize(
    ("shares", "total", "expected"),
    [((0.75, 0.25), 16, [12, 4]), ((0.6, 0.4), 16, [10, 6]), ((1, 1, 1), 16, [6, 5, 5]), ((0.99, 0.01), 16, [16, 0])],
)
def test_largest_remainder(shares: tuple[float, ...], total: int, expected: list[int]) -> None:
    """0.6 x 16 = 9.6 -> 9 and the larger remainder takes the spare one: 10."""
    assert largest_remainder(shares, total) == expected


def test_every_slice_of_a_batch_holds_the_shares() -> None:
    loader = MixedLoader([source("a", 30), source("b", 9)], (0.75, 0.25), 16, 0, True, "--rollout.batch_size")
    for _ in range(5):
        names = [utterance.id[0] for utterance in loader.next_batch()]
        assert [names[start : start + 4].count("b") for start in range(0, 16, 4)] == [1, 1, 1, 1]
    assert loader.num_batches_per_epoch == 3  # 30 / 12 rounded up; the 9 of b go round more often


def test_resumed_mix_gives_the_same_batches() -> None:
    sources = [source("a", 30), source("b", 9)]
    make = lambda: MixedLoader(sources, (0.75, 0.25), 8, 3, True, "--rollout.batch_size")  # noqa: E731
    whole = make()
    batches = [whole.next_batch() for _ in range(9)]
    first = make()
    for _ in range(4):
        first.next_batch()
    second = make()
    second.load_state_dict(first.state_dict())
    assert [second.next_batch() for _ in range(5)] == batches[4:]
    with pytest.raises(ValueError, match="mixes 2 sources"):
        MixedLoader(sources, (), 8, 3, True, "--rollout.batch_size").load_state_dict(first.state_dict())


def test_a_share_that_rounds_to_nothing_names_the_flag() -> None:
    with pytest.raises(ValueError, match=r"--data.probabilities .* --rollout.batch_size 16 rounds to 0"):
        MixedLoader([source("a", 30), source("b", 9)], (0.99, 0.01), 16, 0, True, "--rollout.batch_size")


def test_ctc_units_are_words_and_han_characters() -> None:
    assert ctc_units([source("a", 2)], "words") == {"on": 1, "turn": 2, "开": 3, "打": 4}


def test_ctc_units_are_all_characters_with_the_space() -> None:
    units = {" ": 1, "n": 2, "o": 3, "r": 4, "t": 5, "u": 6, "开": 7, "打": 8}
    assert ctc_units([source("a", 2)], "characters") == units
