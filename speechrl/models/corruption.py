"""What supervised fine-tuning hides of its inputs, so that a small corpus is not learnt by heart.

Shapes: A outputs of one utterance, D encoder width, N outputs of a batch, or its answer tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SPAN = 5  # encoder outputs that are hidden together: 0.2 s at 25 a second


@dataclass(frozen=True)
class Corruption:
    """Shares of encoder outputs, and of answer tokens that later ones are predicted from, which become 0."""

    audio: float = 0.0
    tokens: float = 0.0


INTACT = Corruption()


def hide_spans(outputs: Sequence[Tensor], share: float) -> list[Tensor]:
    """[A, D] of each utterance with about `share` of its rows 0, in spans of SPAN (SpecAugment's time masks, Park et
    al. 2019, after the encoder). Spans may overlap and are cut off at an end. Draws from torch's CPU stream.
    """
    if not outputs:
        return []
    lengths = torch.tensor([len(item) for item in outputs])
    # a row stays if none of the SPAN starts that reach it is drawn: (1 - p)^SPAN = 1 - share
    starts = torch.rand(int(lengths.sum()) + len(outputs) * (SPAN - 1)) < 1 - (1 - share) ** (1 / SPAN)
    reached = starts.unfold(0, SPAN, 1).any(-1)
    # the starts of one utterance lie behind those of the other, and each has SPAN - 1 more of them than rows
    utterance_N = torch.arange(len(outputs)).repeat_interleave(lengths)
    hides_N = reached[torch.arange(len(utterance_N)) + (SPAN - 1) * utterance_N]
    rows_ND = torch.cat(list(outputs))
    return list(rows_ND.masked_fill(hides_N[:, None].to(rows_ND.device), 0.0).split(lengths.tolist()))


def hidden_tokens(mask_BR: Tensor, share: float) -> Tensor:
    """[N] bool, in the order of the predicting places of a RowBatch: True where the input there becomes 0 (word
    dropout, Bowman et al. 2016). The first of each row is the prompt's last token and stays.
    """
    first_N = torch.nonzero(mask_BR.cpu())[:, 1] == 0
    return ((torch.rand(len(first_N)) < share) & ~first_N).to(mask_BR.device)
