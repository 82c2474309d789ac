"""Which rank trains which group."""

from __future__ import annotations

from speechrl.training.group import _num_tokens, spread
from speechrl.types import Group, Prompt, Rollout, TrainGroup, Utterance


def group(name: str) -> TrainGroup:
    sample = Rollout((1, 2), (-1.0, -1.0), "stop", 0, "", "")
    return TrainGroup(Group(Prompt(Utterance(name, ""), (3,), ""), (sample, sample)), (1.0, -1.0))


def ids(shares: list[list[TrainGroup]]) -> list[list[str]]:
    return [[item.group.utterance.id for item in share] for share in shares]


def test_groups_stay_where_their_audio_was_encoded() -> None:
    """Group a was dropped for want of spread: the others must not shift to another rank."""
    home = {"a": 0, "b": 1, "c": 0, "d": 1, "e": 0}
    assert ids(spread([group(name) for name in "bcde"], home, 2)) == [["c", "e"], ["b", "d"]]


def test_a_full_rank_passes_groups_on() -> None:
    home = {"a": 0, "b": 1, "c": 0, "e": 0}
    assert ids(spread([group(name) for name in "ace"], home, 2)) == [["a", "e"], ["c"]]


def test_ranks_get_about_equally_many_tokens() -> None:
    """Twice as many groups on one rank as on the other, because they are half as long."""
    long, short = Rollout((1,) * 9, (-1.0,) * 9, "stop", 0, "", ""), Rollout((1,) * 4, (-1.0,) * 4, "stop", 0, "", "")
    groups = [
        TrainGroup(Group(Prompt(Utterance(name, ""), (3, 3), ""), (sample,) * 2), (1.0, -1.0))
        for name, sample in [("a", long), ("b", short), ("c", short), ("d", long), ("e", short), ("f", short)]
    ]
    shares = spread(groups, dict.fromkeys("abcdef", 0), 2)
    assert [sum(_num_tokens(item) for item in share) for share in shares] == [40, 40]
    assert ids(shares) == [["a", "d"], ["b", "c", "e", "f"]]


def test_a_rank_without_groups_gets_one_that_counts_nothing() -> None:
    shares = spread([group("a")], {"a": 1}, 3)
    assert [share[0].advantages for share in shares] == [(None, None), (1.0, -1.0), (None, None)]
