"""Connectionist temporal classification (Graves et al. 2006) beside the transcripts of supervised fine-tuning.

Shapes: U distinct utterances, A frames of the longest, N frames of all, K units and the blank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor


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


def ctc_nll(logits_NK: Tensor, lengths: Sequence[int], target: CtcTarget) -> Tensor:
    """Sum over utterances of -log p(units), nats. Units that don't fit count nothing.

    logits_NK: of all frames, one utterance of `lengths` frames behind the other.
    """
    lengths_U = torch.tensor(lengths)
    utterance_N = torch.arange(len(lengths)).repeat_interleave(lengths_U)
    frame_N = torch.arange(len(utterance_N)) - (lengths_U.cumsum(0) - lengths_U)[utterance_N]
    places_N = (frame_N * len(lengths) + utterance_N).to(logits_NK.device)
    logprobs_NK = logits_NK.float().log_softmax(-1)
    padded = logprobs_NK.new_zeros(max(lengths) * len(lengths), logprobs_NK.shape[1])
    padded.index_copy_(0, places_N, logprobs_NK)  # frame a of utterance u is row a U + u
    return F.ctc_loss(
        padded.view(max(lengths), len(lengths), -1),  # [A, U, K]
        torch.tensor([unit for units in target.units for unit in units], device=logits_NK.device),
        lengths_U,
        torch.tensor([len(units) for units in target.units]),
        reduction="none",
        zero_infinity=True,
    ).sum()
