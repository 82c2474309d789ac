"""Rewards of a batch of groups -> advantages: one function per estimator and one row each in `ADVANTAGES`.

Shapes: P prompts (groups), G samples of one prompt (of the largest group), K parts of the reward.

All rows share one signature, `f(rewards: GroupRewards) -> advantages_PG`: float32, 0 where the reward abstained, and 0
for a group with fewer than 2 valid rewards (it has no baseline). Statistics are taken in float64 over the valid entries
alone. A valid value that is not finite raises ValueError.

Arrays are numpy's: they are small, live where the run is driven and need no gradient, so nothing here waits for torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from speechrl.types import Scores

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

# TRL's constant. Rewards lie within about 1 of each other, so only groups with almost no spread feel it; OpenRLHF's
# 1e-9 would blow rounding noise in such a group up to advantages of 1.
GROUP_NORM_EPS = 1e-4
# Floor of a standard deviation where nothing is added to it; OpenRLHF clamps the batch's variance at 1e-8.
MIN_STD = 1e-4


@dataclass(frozen=True)
class GroupRewards:
    """The rewards of a batch; what stands at an invalid place (NaN included) is never read.

    rewards_PG, valid_PG: False where the reward abstained, or where a group has fewer samples than the largest.
    parts_KPG, part_valid_KPG, weights_K: the parts of the reward, for the estimators in `BY_PARTS`; K is 0 for others.
    """

    rewards_PG: Floats
    valid_PG: Bools
    parts_KPG: Floats
    part_valid_KPG: Bools
    weights_K: Floats

    @classmethod
    def from_scores(cls, scores: Sequence[Scores], estimator: str) -> GroupRewards:
        """At least one group. ValueError names the flag when `estimator` needs parts and weights, and they are missing,
        all 0, or not the same in all groups."""
        rewards_PG, valid_PG = _padded([score.rewards for score in scores])
        if estimator not in BY_PARTS:
            none_KPG = np.zeros((0, *rewards_PG.shape))
            return cls(rewards_PG, valid_PG, none_KPG, none_KPG.astype(bool), np.zeros(0))
        weights = _common_weights(scores, estimator)
        columns = [_padded([score.parts[name] for score in scores]) for name in weights]
        parts_KPG = np.stack([values_PG for values_PG, _ in columns])
        # a sample whose reward abstained takes no part, whatever its parts say
        part_valid_KPG = np.stack([part_valid_PG & valid_PG for _, part_valid_PG in columns])
        return cls(rewards_PG, valid_PG, parts_KPG, part_valid_KPG, np.array(list(weights.values())))


def group_norm(rewards: GroupRewards) -> NDArray[np.float32]:
    """(r - mean) / (std + 1e-4) inside the group: GRPO (Shao et al. 2024, DeepSeekMath, section 4.1).

    The paper writes std without a definition; this is the unbiased one (divisor n - 1), as in TRL and OpenRLHF.
    """
    centred_PG = _centred(rewards.rewards_PG, rewards.valid_PG)
    std_P1 = _std_P(centred_PG, rewards.valid_PG)[:, None]
    return (centred_PG / (std_P1 + GROUP_NORM_EPS)).astype(np.float32)


def mean_centred(rewards: GroupRewards) -> NDArray[np.float32]:
    """r - mean inside the group. Rows "dr_grpo" and "mwer" are both this function; they differ in the loss.

    dr_grpo: Dr. GRPO (Liu et al. 2025, arXiv 2503.20783) with the clipped loss `ppo` and the `constant` normaliser.

    mwer: minimum word error rate training (Prabhavalkar et al. 2018, arXiv 1712.01818) in its sampled form, equation 5:
    the gradient of the expected risk is estimated by 1/G sum_i (W_i - mean W) grad log P(y_i | x), which with r = -W is
    this advantage on the whole sequence's log-prob. So the config pairs it with the loss `reinforce` (no ratio, no
    clipping), no KL and the `constant` normaliser; with `--algo.constant_length 1` the loss is the paper's to the
    letter, any other length only scales it. The paper's better known n-best form (equations 7 and 8: beam hypotheses
    weighted by their probability renormalised over the n-best list) is *not* this: weights that come from a beam would
    count probability twice for hypotheses that were sampled.

    The group's own reward is in the mean, so the expected gradient is (G - 1)/G of the true one; `rloo` is unbiased.
    """
    return _centred(rewards.rewards_PG, rewards.valid_PG).astype(np.float32)


def rloo(rewards: GroupRewards) -> NDArray[np.float32]:
    """r - mean of the group's other rewards: leave-one-out (Kool et al. 2019; Ahmadian et al. 2024, arXiv 2402.14740).

    With n valid rewards this is n / (n - 1) times (r - mean).
    """
    num_valid_P1 = rewards.valid_PG.sum(axis=1, keepdims=True)
    centred_PG = _centred(rewards.rewards_PG, rewards.valid_PG)
    return (centred_PG * num_valid_P1 / np.maximum(num_valid_P1 - 1, 1)).astype(np.float32)


def reinforce_baseline(rewards: GroupRewards) -> NDArray[np.float32]:
    """(r - group mean) / std of the batch: REINFORCE++-baseline (Hu et al. 2025, arXiv 2501.03262).

    The std is the root mean square of all r - group mean (their mean is 0), over valid entries of groups with a
    baseline, at least 1e-4. Completions count once each; OpenRLHF weighs them by their tokens. The rewards must be
    the whole batch of the step: given one rank's share, the result would depend on the number of ranks.
    """
    centred_PG = _centred(rewards.rewards_PG, rewards.valid_PG)
    num_counted = _with_baseline(rewards.valid_PG).sum()
    std = np.sqrt(np.square(centred_PG).sum() / max(num_counted, 1))
    return (centred_PG / max(std, MIN_STD)).astype(np.float32)


def gdpo(rewards: GroupRewards) -> NDArray[np.float32]:
    """sum_k w_k (r_k - mean) / std of each part inside its group, then divided by the standard deviation of the batch:
    GDPO (Liu et al. 2026, arXiv 2601.05242).

    Each part speaks as loudly as its weight says, whatever its scale, and samples with the same total but different
    parts stay apart. The mean of the batch need not be taken off: every part adds up to 0 in its group. A part that
    abstains for a sample adds nothing there, as does one without spread. Both deviations are unbiased, as in TRL
    (`normalize_then_sum`), which adds 1e-4 to them; here they are at least 1e-4, so that a part times 100 changes
    nothing. The batch's deviation counts the samples of which some part has a baseline; as in `reinforce_baseline` it
    must be the whole batch of the step.
    """
    sum_PG = np.zeros(rewards.rewards_PG.shape)
    counted_PG = np.zeros(rewards.valid_PG.shape, dtype=bool)
    for part_PG, valid_PG, weight in zip(rewards.parts_KPG, rewards.part_valid_KPG, rewards.weights_K, strict=True):
        if weight == 0:
            continue
        centred_PG = _centred(part_PG, valid_PG)
        sum_PG += weight * centred_PG / np.maximum(_std_P(centred_PG, valid_PG), MIN_STD)[:, None]
        counted_PG |= _with_baseline(valid_PG)
    std = np.sqrt(np.square(sum_PG).sum() / max(counted_PG.sum() - 1, 1))
    return (sum_PG / max(std, MIN_STD)).astype(np.float32)


ADVANTAGES: dict[str, Callable[[GroupRewards], NDArray[np.float32]]] = {
    "group_norm": group_norm,
    "dr_grpo": mean_centred,
    "rloo": rloo,
    "reinforce_baseline": reinforce_baseline,
    "mwer": mean_centred,
    "gdpo": gdpo,
}
BY_PARTS = frozenset({"gdpo"})  # read the parts and their weights in place of the reward


def has_spread(rewards: GroupRewards, threshold: float) -> Bools:
    """Which groups carry a gradient, bool [P]: a standard deviation (unbiased) above `threshold`.

    Of the rewards; of any part with a weight, where the estimator reads parts: its advantages may differ where the
    totals are equal. On the std and not on the mean: eight rewards of 0.97 teach nothing though their mean is neither 0
    nor 1. A group with fewer than 2 valid values has none.
    """
    if not len(rewards.weights_K):
        return _std_P(_centred(rewards.rewards_PG, rewards.valid_PG), rewards.valid_PG) > threshold
    spread_P = np.zeros(len(rewards.rewards_PG), dtype=bool)
    for part_PG, valid_PG, weight in zip(rewards.parts_KPG, rewards.part_valid_KPG, rewards.weights_K, strict=True):
        if weight != 0:
            spread_P |= _std_P(_centred(part_PG, valid_PG), valid_PG) > threshold
    return spread_P


def as_rows(advantages_PG: NDArray[np.float32], scores: Sequence[Scores]) -> list[tuple[float | None, ...]]:
    """One tuple per group, as long as the group; None where the reward abstained."""
    return [
        tuple(
            None if reward is None else value
            for value, reward in zip(row[: len(score.rewards)], score.rewards, strict=True)
        )
        for row, score in zip(advantages_PG.tolist(), scores, strict=True)
    ]


def _common_weights(scores: Sequence[Scores], estimator: str) -> dict[str, float]:
    weights = dict(scores[0].weights)
    flag = f"--algo.advantage.estimator {estimator}"
    if not weights:
        told = "parts without weights" if scores[0].parts else "no parts"
        raise ValueError(
            f"{flag} normalises each part of the reward, but the reward (--reward.remote_url) gives {told}; let it "
            'return "parts" and "weights", or take group_norm'
        )
    if not any(weights.values()):
        raise ValueError(f"{flag}: all weights of the reward's parts are 0: {weights}")
    for score in scores:
        if score.weights != weights:
            raise ValueError(f"{flag}: the reward gave the weights {weights}, and {dict(score.weights)} in one batch")
    return weights


def _padded(rows: Sequence[Sequence[float | None]]) -> tuple[Floats, Bools]:
    """([P, G] values, 0 where there is none, [P, G] where there is one)."""
    size = max(len(row) for row in rows)
    full = [[*row, *[None] * (size - len(row))] for row in rows]
    values_PG = np.array([[0.0 if value is None else value for value in row] for row in full], dtype=np.float64)
    return values_PG, np.array([[value is not None for value in row] for row in full], dtype=bool)


def _with_baseline(valid_PG: Bools) -> Bools:
    """Valid places of groups that have at least 2."""
    return valid_PG & (valid_PG.sum(axis=1, keepdims=True) >= 2)


def _centred(values_PG: Floats, valid_PG: Bools) -> Floats:
    """r - mean of the group's valid values; 0 where invalid or where the group has fewer than 2 valid."""
    assert values_PG.shape == valid_PG.shape and values_PG.ndim == 2, (values_PG.shape, valid_PG.shape)
    # where, not a product: 0 * NaN is NaN
    values_PG = np.where(valid_PG, values_PG.astype(np.float64), 0.0)
    if not np.isfinite(values_PG).all():
        row, column = np.argwhere(~np.isfinite(values_PG))[0]
        value = values_PG[row, column]
        raise ValueError(f"the reward of sample {column} of group {row} is {value}, which is not finite")
    num_valid_P1 = valid_PG.sum(axis=1, keepdims=True)
    mean_P1 = values_PG.sum(axis=1, keepdims=True) / np.maximum(num_valid_P1, 1)
    return np.where(_with_baseline(valid_PG), values_PG - mean_P1, 0.0)


def _std_P(centred_PG: Floats, valid_PG: Bools) -> Floats:
    return np.sqrt(np.square(centred_PG).sum(axis=1) / np.maximum(valid_PG.sum(axis=1) - 1, 1))
