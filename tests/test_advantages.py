"""Shapes: P prompts (groups), G samples of one prompt."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speechrl.algorithms.advantages import ADVANTAGES, group_spread, has_spread

NAN = float("nan")
ALL = list(ADVANTAGES)


def run(name: str, rewards: list[list[float | None]]) -> list[list[float]]:
    """None marks an abstained reward, which reaches the function as NaN."""
    rewards_PG = torch.tensor([[NAN if r is None else r for r in row] for row in rewards])
    valid_PG = torch.tensor([[r is not None for r in row] for row in rewards])
    result_PG = ADVANTAGES[name](rewards_PG, valid_PG)
    assert result_PG.dtype == torch.float32
    return result_PG.tolist()


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
        ADVANTAGES[name](torch.tensor([[0.0, float("inf")]]), torch.ones(1, 2, dtype=torch.bool))


def test_spread_is_the_unbiased_std_and_filters_on_it():
    rewards_PG = torch.tensor([[0.97, 0.97, 0.97, 0.97], [1, 2, 3, 6], [0, 2, NAN, NAN], [5, NAN, NAN, NAN]])
    valid_PG = ~rewards_PG.isnan()
    # Second: sqrt(14 / 3). Third: of 0 and 2, sqrt((1 + 1) / 1). A lone reward has none.
    wanted = [0, math.sqrt(14 / 3), math.sqrt(2), 0]
    assert group_spread(rewards_PG, valid_PG).tolist() == pytest.approx(wanted, abs=1e-6)
    assert has_spread(rewards_PG, valid_PG, 1e-6).tolist() == [False, True, True, False]
    assert has_spread(rewards_PG, valid_PG, 1.5).tolist() == [False, True, False, False]
    assert has_spread(rewards_PG, valid_PG, 0.0).tolist() == [False, True, True, False]


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
@given(rows=groups, name=st.sampled_from([name for name in ALL if name != "reinforce_baseline"]))
def test_groups_do_not_see_each_other(rows, name):
    close(run(name, rows), [run(name, [row])[0] for row in rows])
