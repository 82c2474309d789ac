"""Weights of tokens whose sampler and trainer disagree, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from speechrl.algorithms.correction import correction

NAN = float("nan")
# two rows; ratios trainer / sampler: 1, 4, 0.25 and 1.5, 2.5 (then padding)
RATIOS = [[1.0, 4.0, 0.25], [1.5, 2.5, NAN]]
TRAINER = torch.tensor([[-1.0 + math.log(r) for r in row] for row in RATIOS])
SAMPLER = torch.full((2, 3), -1.0)
MASK = torch.tensor([[True, True, True], [True, True, False]])


@pytest.mark.parametrize(
    ("method", "weights", "touched"),
    [
        ("none", [[1, 1, 1], [1, 1]], 0),
        ("tis", [[1, 2, 0.25], [1.5, 2]], 2),  # 4 and 2.5 are cut to 2
        ("icepop", [[1, 0, 0], [1.5, 0]], 3),  # 4, 0.25 and 2.5 lie outside [0.5, 2]
        ("sequence_mask", [[1, 1, 1], [1, 1]], 0),  # geometric means 1 and 1.94
    ],
)
def test_golden(method: str, weights: list, touched: int) -> None:
    weight_BT, count = correction(method, TRAINER, SAMPLER, MASK, (0.5, 2.0))
    assert weight_BT[MASK].tolist() == pytest.approx([weight for row in weights for weight in row], rel=1e-5)
    assert int(count) == touched
    assert bool(weight_BT.isfinite().all())  # padding may be NaN


def test_sequence_mask_drops_the_whole_completion() -> None:
    weight_BT, count = correction("sequence_mask", TRAINER, SAMPLER, MASK, (0.5, 1.9))
    assert weight_BT[MASK].tolist() == [1, 1, 1, 0, 0]
    assert int(count) == 2


def test_extreme_ratios_stay_finite() -> None:
    trainer, sampler = torch.tensor([[-1e4, 0.0]]), torch.tensor([[0.0, -1e4]])
    weight_BT, _ = correction("icepop", trainer, sampler, MASK[:1, :2], (0.5, 2.0))
    assert weight_BT.tolist() == [[0.0, 0.0]]
