"""Shapes: P prompts (groups), G samples of one prompt."""

import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speechrl.algorithms.advantages import ADVANTAGES, BY_PARTS, GroupRewards, as_rows, has_spread
from speechrl.types import Scores

NAN = float("nan")
ALL = list(ADVANTAGES)


def scores_of(rewards: list[list[float | None]]) -> list[Scores]:
    """With the reward as its only part, for the estimators that read parts."""
    return [Scores(tuple(row), {"all": tuple(row)}, {"all": 2.0}) for row in rewards]


def run(name: str, rewards: list[list[float | None]]) -> list[list[float]]:
    """None marks an abstained reward."""
    result_PG = ADVANTAGES[name](GroupRewards.from_scores(scores_of(rewards), name))
    assert result_PG.dtype == np.float32
    return result_PG.tolist()


def run_gdpo(groups: list[dict[str, list[float | None]]], weights: dict[str, float]) -> list[list[float]]:
    """Groups of parts; the reward is the sum of what is there, or None where nothing is."""
    scores = []
    for parts in groups:
        totals = [[v for v in column if v is not None] for column in zip(*parts.values(), strict=True)]
        rewards = tuple(sum(values) if values else None for values in totals)
        scores.append(Scores(rewards, {name: tuple(values) for name, values in parts.items()}, weights))
    return ADVANTAGES["gdpo"](GroupRewards.from_scores(scores, "gdpo")).tolist()


def close(rows: list[list[float]], wanted: list[list[float]]) -> None:
    for row, wanted_row in zip(rows, wanted, strict=True):
        assert row == pytest.approx(wanted_row, abs=2e-6)


def test_group_norm_by_hand():
    # mean of 1, 2, 3, 6 is 3; r - mean = -2, -1, 0, 3; squares add to 14; unbiased std = sqrt(14 / 3) = 2.1602469
    d = math.sqrt(14 / 3) + 1e-4
    close(run("group_norm", [[1, 2, 3, 6]]), [[-2 / d, -1 / d, 0, 3 / d]])
    assert run("group_norm", [[1, 2, 3, 6]])[0][3] == pytest.approx(1.388666, abs=1e-5)  # 3 / 2.1603469


def test_dr_grpo_and_mwer_by_hand():
    close(run("dr_grpo", [[1, 2, 3, 6], [0, 0, 0, 1]]), [[-2, -1, 0, 3], [-0.25, -0.25, -0.25, 0.75]])
    assert ADVANTAGES["mwer"] is ADVANTAGES["dr_grpo"]


def test_rloo_by_hand():
    # 1 against (2+3+6)/3 = 11/3; 2 against 10/3; 3 against 9/3; 6 against 6/3
    close(run("rloo", [[1, 2, 3, 6]]), [[-8 / 3, -4 / 3, 0, 4]])


def test_reinforce_baseline_by_hand():
    # r - group mean: -1, 1 and -3, 3; mean square (1 + 1 + 9 + 9) / 4 = 5
    d = math.sqrt(5)
    close(run("reinforce_baseline", [[0, 2], [4, 10]]), [[-1 / d, 1 / d], [-3 / d, 3 / d]])


def test_abstained_rewards_leave_the_statistics():
    # The group is 1, 2, 3, 6 again with an abstained sample in the middle.
    d = math.sqrt(14 / 3) + 1e-4
    close(run("group_norm", [[1, 2, None, 3, 6]]), [[-2 / d, -1 / d, 0, 0, 3 / d]])
    close(run("dr_grpo", [[1, 2, None, 3, 6]]), [[-2, -1, 0, 0, 3]])
    close(run("rloo", [[1, 2, None, 3, 6]]), [[-8 / 3, -4 / 3, 0, 0, 4]])
    # The lone reward 9 has no baseline and must not change the batch's std (still sqrt(5), over 4 rewards).
    d = math.sqrt(5)
    close(
        run("reinforce_baseline", [[0, 2, None], [4, 10, None], [9, None, None]]),
        [[-1 / d, 1 / d, 0], [-3 / d, 3 / d, 0], [0, 0, 0]],
    )


@pytest.mark.parametrize("name", ALL)
def test_no_baseline_and_no_spread_give_zero(name):
    close(run(name, [[7, None, None], [None, None, None], [0.1, 0.1, 0.1]]), [[0, 0, 0]] * 3)


@pytest.mark.parametrize("name", ALL)
def test_valid_reward_that_is_not_finite_is_refused(name):
    with pytest.raises(ValueError, match="sample 1 of group 0 is inf"):
        run(name, [[0.0, math.inf]])


@pytest.mark.parametrize("name", ALL)
def test_what_stands_at_an_invalid_place_is_never_read(name):
    rewards = GroupRewards.from_scores(scores_of([[1, 2, None], [4, 10, 5]]), name)
    spoiled = GroupRewards(
        np.where(rewards.valid_PG, rewards.rewards_PG, NAN),
        rewards.valid_PG,
        np.where(rewards.part_valid_KPG, rewards.parts_KPG, NAN),
        rewards.part_valid_KPG,
        rewards.weights_K,
    )
    assert ADVANTAGES[name](spoiled).tolist() == ADVANTAGES[name](rewards).tolist()
    assert has_spread(spoiled, 1e-6).tolist() == [True, True]


@pytest.mark.parametrize("name", ALL)
def test_groups_of_different_sizes(name):
    """A short group is one whose other samples abstained; its row is cut to its own length."""
    rows, full = [[1, 2], [4, None, 10]], [[1, 2, None], [4, None, 10]]
    assert run(name, rows) == run(name, full)
    batch = GroupRewards.from_scores(scores_of(rows), name)
    cut = as_rows(ADVANTAGES[name](batch), scores_of(rows))
    assert [len(row) for row in cut] == [2, 3]
    assert [[value is None for value in row] for row in cut] == [[False, False], [False, True, False]]


def test_spread_is_the_unbiased_std_and_filters_on_it():
    rows = [[0.97, 0.97, 0.97, 0.97], [1, 2, 3, 6], [0, 2, None, None], [5, None, None, None]]
    rewards = GroupRewards.from_scores(scores_of(rows), "group_norm")
    # Second: sqrt(14 / 3) = 2.1602. Third: of 0 and 2, sqrt((1 + 1) / 1) = 1.4142. A lone reward has none.
    assert has_spread(rewards, 1e-6).tolist() == [False, True, True, False]
    assert has_spread(rewards, 1.4143).tolist() == [False, True, False, False]
    assert has_spread(rewards, 1.4142).tolist() == [False, True, True, False]
    assert has_spread(rewards, 2.1603).tolist() == [False, False, False, False]
    assert has_spread(rewards, 0.0).tolist() == [False, True, True, False]


# --- gdpo -----------------------------------------------------------------------------------------------------------


def test_gdpo_by_hand():
    # a: 0, 2 has mean 1 and std sqrt(2): -+1/sqrt(2); 0, 8 has the same. b: 1, 0 gives +-1/sqrt(2); 5, 5 has no spread.
    # weights 3 and 1: group 1 gets -+3/sqrt(2) +- 1/sqrt(2) = -+sqrt(2), group 2 gets -+3/sqrt(2).
    # batch: squares 2 + 2 + 4.5 + 4.5 = 13, std sqrt(13 / 3)
    groups = [{"a": [0, 2], "b": [1, 0]}, {"a": [0, 8], "b": [5, 5]}]
    d = math.sqrt(13 / 3)
    first, second = math.sqrt(2) / d, 3 / math.sqrt(2) / d
    close(run_gdpo(groups, {"a": 3, "b": 1}), [[-first, first], [-second, second]])
    assert run_gdpo(groups, {"a": 3, "b": 1})[1][1] == pytest.approx(1.0190493, abs=1e-6)


def test_gdpo_of_three_samples_by_hand():
    # a: 0, 1, 2 has std 1: -1, 0, 1. b: 1, 1, 0 has mean 2/3, std sqrt((1/9 + 1/9 + 4/9) / 2) = sqrt(1/3):
    # 1/sqrt(3) twice, -2/sqrt(3). Sum with weights 1, 1: -0.4226497, 0.5773503, -0.1547005; squares add to
    # 0.1786328 + 0.3333333 + 0.0239323 = 0.5358984, std sqrt(0.5358984 / 2) = 0.5176381
    wanted = [-0.8164966, 1.1153551, -0.2988585]
    close(run_gdpo([{"a": [0, 1, 2], "b": [1, 1, 0]}], {"a": 1, "b": 1}), [wanted])


def test_gdpo_keeps_apart_what_has_the_same_total():
    """The paper's point: three samples with a total of 1 are one to group_norm, whichever part it came from."""
    group = {"a": [1, 0, 0, 1], "b": [0, 1, 0, 1], "c": [0, 0, 1, 0]}
    total = [1, 1, 1, 2]
    assert len(set(run("group_norm", [total])[0])) == 2
    # a and b differ in nothing but names for the first two samples; c is rarer, so its sample stands apart
    values = run_gdpo([group], {"a": 1, "b": 1, "c": 1})[0]
    assert len({round(value, 5) for value in values}) == 3


def test_gdpo_has_spread_where_a_part_has_it():
    scores = [
        Scores((1.0, 1.0), {"a": (1.0, 0.0), "b": (0.0, 1.0)}, {"a": 1.0, "b": 1.0}),
        Scores((1.0, 1.0), {"a": (0.5, 0.5), "b": (0.5, 0.5)}, {"a": 1.0, "b": 1.0}),
    ]
    assert has_spread(GroupRewards.from_scores(scores, "gdpo"), 1e-6).tolist() == [True, False]
    assert has_spread(GroupRewards.from_scores(scores, "group_norm"), 1e-6).tolist() == [False, False]
    muted = [Scores(score.rewards, score.parts, {"a": 0.0, "b": 1.0}) for score in scores]
    muted[0] = Scores((1.0, 1.0), {"a": (1.0, 0.0), "b": (1.0, 1.0)}, {"a": 0.0, "b": 1.0})
    assert has_spread(GroupRewards.from_scores(muted, "gdpo"), 1e-6).tolist() == [False, False]


def test_gdpo_parts_that_abstain_add_nothing():
    # b abstains in the second group, c everywhere: as if they had weight 0 there
    weights = {"a": 1, "b": 1, "c": 5}
    groups = [
        {"a": [0, 1, 2], "b": [1, 1, 0], "c": [None] * 3},
        {"a": [0, 1, 2], "b": [None] * 3, "c": [None] * 3},
    ]
    # sums -0.4226497, 0.5773503, -0.1547005 (above) and -1, 0, 1; squares 0.5358984 + 2, std sqrt(2.5358984 / 5)
    d = math.sqrt(2.5358984 / 5)
    wanted = [[-0.4226497 / d, 0.5773503 / d, -0.1547005 / d], [-1 / d, 0, 1 / d]]
    close(run_gdpo(groups, weights), wanted)
    # within a group: a has 0 and 2 left (+-1/sqrt(2)), the third sample has b alone
    values = run_gdpo([{"a": [0, 2, None], "b": [1, 1, 1]}], {"a": 1, "b": 1})
    close(values, [[-1.0, 1.0, 0.0]])  # squares 1/2 + 1/2 over 3 samples: std sqrt(1/2)


def test_gdpo_leaves_out_samples_whose_reward_abstained():
    parts = {"a": (0.0, 2.0, 100.0)}
    scores = [Scores((1.0, 1.0, None), parts, {"a": 1.0})]
    # 0 and 2 remain: -+1/sqrt(2), squares add to 1 over 2 samples: std 1
    values = ADVANTAGES["gdpo"](GroupRewards.from_scores(scores, "gdpo")).tolist()
    close(values, [[-math.sqrt(0.5), math.sqrt(0.5), 0.0]])


BAD_PARTS = [
    ([Scores((1.0, 0.0))], "gives no parts; let it return"),
    ([Scores((1.0, 0.0), {"a": (1.0, 0.0)})], "gives parts without weights; let it return"),
    ([Scores((1.0, 0.0), {"a": (1.0, 0.0)}, {"a": 0.0})], "all weights of the reward's parts are 0: {'a': 0.0}"),
    (
        [Scores((1.0, 0.0), {"a": (1.0, 0.0)}, {"a": weight}) for weight in (1.0, 2.0)],
        "the reward gave the weights {'a': 1.0}, and {'a': 2.0} in one batch",
    ),
]


@pytest.mark.parametrize(("scores", "message"), BAD_PARTS)
def test_gdpo_without_parts_or_weights_names_the_flag(scores: list[Scores], message: str):
    with pytest.raises(ValueError, match=f"--algo.advantage.estimator gdpo.*{re.escape(message)}"):
        GroupRewards.from_scores(scores, "gdpo")
    assert GroupRewards.from_scores(scores, "rloo").weights_K.shape == (0,)


def reference_gdpo(groups: list[dict[str, list[float]]], weights: dict[str, float]) -> np.ndarray:
    """The paper's equations written down again, plainly: no abstentions, a mean taken off the batch."""
    sums = []
    for parts in groups:
        row = np.zeros(len(next(iter(parts.values()))))
        for name, values in parts.items():
            spread = np.std(values, ddof=1)
            row = row + weights[name] * (np.array(values) - np.mean(values)) / (spread if spread > 1e-9 else 1.0)
        sums.append(row)
    batch = np.array(sums)
    spread = np.std(batch, ddof=1)
    return (batch - batch.mean()) / (spread if spread > 1e-9 else 1.0)


part = st.integers(-16, 16).map(lambda n: n / 8)
part_groups = st.integers(2, 5).flatmap(
    lambda size: st.lists(
        st.fixed_dictionaries({name: st.lists(part, min_size=size, max_size=size) for name in "ab"}),
        min_size=1,
        max_size=4,
    )
)
WEIGHTS = {"a": 0.7, "b": 0.3}


@settings(deadline=None, max_examples=60)
@given(groups=part_groups)
def test_gdpo_agrees_with_the_paper_written_down_again(groups):
    close(run_gdpo(groups, WEIGHTS), reference_gdpo(groups, WEIGHTS).tolist())


@settings(deadline=None, max_examples=60)
@given(groups=part_groups, factor=st.sampled_from([0.25, 3.0, 1000.0]), shift=st.integers(-3, 3))
def test_gdpo_does_not_see_the_scale_of_a_part_nor_of_all_weights(groups, factor, shift):
    plain = run_gdpo(groups, WEIGHTS)
    scaled = [{"a": [factor * value + shift for value in group["a"]], "b": group["b"]} for group in groups]
    close(run_gdpo(scaled, WEIGHTS), plain)
    close(run_gdpo(groups, {"a": 7.0, "b": 3.0}), plain)


# --- invariances of all of them -------------------------------------------------------------------------------------

# Eighths in [-4, 4]: sums of them are exact, so a permutation can't show up as rounding.
reward = st.one_of(st.none(), st.integers(-32, 32).map(lambda n: n / 8))
groups = st.integers(1, 6).flatmap(
    lambda size: st.lists(st.lists(reward, min_size=size, max_size=size), min_size=1, max_size=4)
)


@settings(deadline=None, max_examples=60)
@given(rows=groups, name=st.sampled_from(ALL), random=st.randoms(use_true_random=False))
def test_permuting_samples_and_groups_permutes_advantages(rows, name, random):
    size = len(rows[0])
    columns, order = random.sample(range(size), size), random.sample(range(len(rows)), len(rows))
    plain = run(name, rows)
    permuted = run(name, [[rows[p][g] for g in columns] for p in order])
    close(permuted, [[plain[p][g] for g in columns] for p in order])


@settings(deadline=None, max_examples=60)
@given(rows=groups, name=st.sampled_from(ALL), shift=st.integers(-8, 8))
def test_shift_changes_nothing_and_groups_add_to_zero(rows, name, shift):
    plain = run(name, rows)
    close(run(name, [[None if r is None else r + shift for r in row] for row in rows]), plain)
    assert [sum(row) for row in plain] == pytest.approx([0] * len(rows), abs=1e-5)
    assert all(a == 0 for row, out in zip(rows, plain, strict=True) for r, a in zip(row, out, strict=True) if r is None)


@settings(deadline=None, max_examples=60)
@given(rows=groups, name=st.sampled_from([name for name in ALL if name not in ("reinforce_baseline", *BY_PARTS)]))
def test_groups_do_not_see_each_other(rows, name):
    close(run(name, rows), [run(name, [row])[0] for row in rows])
