"""Rows of tokens -> padded tensors. The only place that pads.

Shapes: B rows, T prompt and response tokens padded right, R response tokens padded right, U distinct utterances of the
rows, A audio tokens of one utterance, D encoder width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from speechrl.models.families import Features
from speechrl.types import TrainGroup


@dataclass(frozen=True)
class Row:
    """One prompt with one response, and what the loss needs to know about it.

    utterance_id: which audio its placeholders stand for. old_logprobs: of the policy before the first optimiser step on
    this rollout batch, where there are several. weight: 0 for a row that only keeps ranks in step.
    """

    utterance_id: str
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    advantage: float = 0.0
    sampler_logprobs: tuple[float, ...] = ()
    ref_logprobs: tuple[float, ...] = ()
    old_logprobs: tuple[float, ...] = ()
    weight: float = 1.0


@dataclass(frozen=True)
class RowBatch:
    """Padded rows.

    ids_BT: prompt then response. response_ids_BR, mask_BR: the responses alone, True on real tokens. prompt_lengths: B.
    audio: per distinct utterance its encoder output [A, D], or its Features where the encoder trains; empty for text.
    audio_index: B, the row's entry in `audio`.
    """

    ids_BT: Tensor
    response_ids_BR: Tensor
    mask_BR: Tensor
    prompt_lengths: tuple[int, ...]
    audio: tuple[Tensor | Features, ...] = ()
    audio_index: tuple[int, ...] = ()


def rows_of(groups: Sequence[TrainGroup]) -> list[Row]:
    """One row per rollout whose reward did not abstain; one row that counts nothing if there is no other."""
    rows: list[Row] = []
    for item in groups:
        for index, (rollout, advantage) in enumerate(zip(item.group.rollouts, item.advantages, strict=True)):
            rows.append(
                Row(
                    utterance_id=item.group.utterance.id,
                    prompt_ids=item.group.prompt.token_ids,
                    response_ids=rollout.token_ids,
                    advantage=advantage or 0.0,
                    sampler_logprobs=rollout.logprobs,
                    ref_logprobs=item.ref_logprobs[index] if item.ref_logprobs else (),
                    weight=0.0 if advantage is None else 1.0,
                )
            )
    return [row for row in rows if row.weight] or rows[:1]


def micro_batches(rows: Sequence[Row], size: int) -> list[list[Row]]:
    """Rows of similar length together, so that little is padded. The order never changes the gradient."""
    ordered = sorted(rows, key=lambda row: (len(row.prompt_ids) + len(row.response_ids), row.utterance_id))
    return [list(ordered[start : start + size]) for start in range(0, len(ordered), size)]


def collate(
    rows: Sequence[Row], audio: Mapping[str, Tensor | Features], pad_id: int, device: torch.device | str
) -> RowBatch:
    """Pad rows to tensors on `device`. `audio` maps utterance ids to encoder outputs or features; empty for text."""
    ids = list(dict.fromkeys(row.utterance_id for row in rows)) if audio else []
    position = {utterance_id: index for index, utterance_id in enumerate(ids)}
    return RowBatch(
        ids_BT=pad([row.prompt_ids + row.response_ids for row in rows], pad_id, torch.long).to(device),
        response_ids_BR=pad([row.response_ids for row in rows], pad_id, torch.long).to(device),
        mask_BR=pad([[1] * len(row.response_ids) for row in rows], 0, torch.bool).to(device),
        prompt_lengths=tuple(len(row.prompt_ids) for row in rows),
        audio=tuple(audio[utterance_id] for utterance_id in ids),
        audio_index=tuple(position[row.utterance_id] for row in rows) if audio else (),
    )


def pad(sequences: Sequence[Sequence[float]], value: float, dtype: torch.dtype, left: bool = False) -> Tensor:
    """[B, longest]: sequences padded with `value` on the right, or on the left."""
    width = max(len(sequence) for sequence in sequences)
    out = torch.full((len(sequences), width), value, dtype=dtype)
    for row, sequence in enumerate(sequences):
        if len(sequence):
            start = width - len(sequence) if left else 0
            out[row, start : start + len(sequence)] = torch.tensor(sequence, dtype=dtype)
    return out
