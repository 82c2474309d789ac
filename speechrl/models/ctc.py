"""Connectionist temporal classification (Graves et al. 2006) beside the transcripts of supervised fine-tuning.

Shapes: U distinct utterances, A frames of one utterance, K units and the blank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class CtcTarget:
    """Unit ids of each distinct utterance of a batch, in the order of its audio; 0 is the blank. alone: nothing else is
    asked for, and the language model does not run.
    """

    units: tuple[tuple[int, ...], ...]
    alone: bool = False


def fits(units: Sequence[int], num_frames: int) -> bool:
    """Whether so many frames can spell the units: one each, and a blank between two that are alike."""
    return len(units) + sum(first == second for first, second in pairwise(units)) <= num_frames


def ctc_nll(logits: Sequence[Tensor], target: CtcTarget) -> Tensor:
    """Sum over utterances of -log p(units), nats, of logits [A, K] each. Units that don't fit count nothing."""
    lengths = [len(item) for item in logits]
    logprobs = [item.float().log_softmax(-1) for item in logits]
    return F.ctc_loss(
        nn.utils.rnn.pad_sequence(logprobs),  # [A, U, K]
        torch.tensor([unit for units in target.units for unit in units], device=logprobs[0].device),
        torch.tensor(lengths),
        torch.tensor([len(units) for units in target.units]),
        reduction="none",
        zero_infinity=True,
    ).sum()
