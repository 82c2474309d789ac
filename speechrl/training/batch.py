"""Rows -> sequences of tokens -> padded tensors. The only place that pads, packs or shares a prompt.

Plain: every row is a sequence, [prompt | response]. Shared prefix: the rows of one prompt are one sequence,
[prompt | response 1 | ... | response G]; a response sees the prompt and itself, and its positions follow the prompt's:
the numbers are those of G plain sequences, and the prompt is computed once.

Shapes: B rows, R response tokens padded right, S sequences, T tokens of a sequence padded right, N response tokens of
all rows, U distinct utterances of the rows, A audio tokens of one utterance, D encoder width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from speechrl.models.family import Features
from speechrl.types import TrainGroup

PADDING = -1  # group of tokens that only fill up a sequence


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
class Packing:
    """How rows share forward passes. Never changes a number, only its cost.

    max_rows: of a micro-batch; rows that share a prompt stay together, so there may be more. max_tokens: of a
    micro-batch with its padding, instead of max_rows; 0 for none. shared_prefix: see above. one_sequence: put all
    prompts of a micro-batch behind each other, for attention kernels that skip masked blocks. multiple: sequences are
    padded to a multiple of this.
    """

    max_rows: int = 16
    max_tokens: int = 0
    shared_prefix: bool = True
    one_sequence: bool = False
    multiple: int = 1


@dataclass(frozen=True)
class RowBatch:
    """Rows as tensors.

    ids_ST: the sequences. positions_ST, group_ST, branch_ST: None where every sequence is one row. Otherwise a token's
    position, the number of its prompt in the batch (PADDING for none) and 0 in a prompt, i in its i-th response.
    sequence_N, place_N: where the token that predicts each response token lies, row after row.
    response_ids_BR, mask_BR: the responses alone, True on real tokens. num_tokens: real tokens of all sequences.
    audio: per distinct utterance its encoder output [A, D], or its Features where the encoder trains; empty for text.
    audio_index: the entry in `audio` of each prompt, in the order in which prompts lie in the sequences.
    """

    ids_ST: Tensor
    positions_ST: Tensor | None
    group_ST: Tensor | None
    branch_ST: Tensor | None
    sequence_N: Tensor
    place_N: Tensor
    response_ids_BR: Tensor
    mask_BR: Tensor
    num_tokens: int
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


# --- micro-batches --------------------------------------------------------------------------------------------------

Bundle = list[Row]  # rows that share one prompt in a sequence; a single row without a shared prefix


def micro_batches(rows: Sequence[Row], packing: Packing) -> list[list[Row]]:
    """Rows of similar cost together, so that little is padded. The order never changes the gradient."""
    bundles = sorted(_bundles(rows, packing.shared_prefix), key=lambda item: (num_tokens(item), item[0].utterance_id))
    batches: list[list[Bundle]] = []
    for bundle in bundles:
        if batches and _fits([*batches[-1], bundle], packing):
            batches[-1].append(bundle)
        else:
            batches.append([bundle])
    return [[row for bundle in batch for row in bundle] for batch in batches]


def num_tokens(bundle: Bundle) -> int:
    """Tokens of the sequence that these rows of one prompt make."""
    return len(bundle[0].prompt_ids) + sum(len(row.response_ids) for row in bundle)


def group_sizes(rows: Sequence[Row]) -> list[tuple[int, list[int]]]:
    """(prompt tokens, tokens of each response) of every prompt."""
    bundles = _bundles(rows, shared_prefix=True)
    return [(len(bundle[0].prompt_ids), [len(row.response_ids) for row in bundle]) for bundle in bundles]


def _bundles(rows: Sequence[Row], shared_prefix: bool) -> list[Bundle]:
    if not shared_prefix:
        return [[row] for row in rows]
    found: dict[tuple, Bundle] = {}
    for row in rows:
        found.setdefault((row.utterance_id, row.prompt_ids), []).append(row)
    return list(found.values())


def _fits(batch: list[Bundle], packing: Packing) -> bool:
    if not packing.max_tokens:
        return sum(map(len, batch)) <= packing.max_rows
    sizes = list(map(num_tokens, batch))
    total = sum(sizes) if packing.one_sequence else max(sizes) * len(sizes)
    return total <= packing.max_tokens


# --- tensors --------------------------------------------------------------------------------------------------------


def collate(
    rows: Sequence[Row],
    audio: Mapping[str, Tensor | Features],
    pad_id: int,
    device: torch.device | str,
    packing: Packing,
) -> RowBatch:
    """Rows as tensors on `device`. `audio` maps utterance ids to encoder outputs or features; empty for text."""
    bundles = _bundles(rows, packing.shared_prefix)
    sequences = [_Sequence() for _ in (bundles[:1] if packing.one_sequence else bundles)]
    places: dict[int, list[tuple[int, int]]] = {}  # by the row's identity
    for group, bundle in enumerate(bundles):
        index = 0 if packing.one_sequence else group
        places.update(sequences[index].add(bundle, group, index))
    all_places = np.array([place for row in rows for place in places[id(row)]], dtype=np.int64).reshape(-1, 2)
    where = torch.from_numpy(all_places).to(device)
    ids = list(dict.fromkeys(row.utterance_id for row in rows)) if audio else []
    position = {utterance_id: index for index, utterance_id in enumerate(ids)}

    def padded(name: str, value: int) -> Tensor:
        return pad([getattr(item, name) for item in sequences], value, torch.long, packing.multiple).to(device)

    branched = packing.shared_prefix or packing.one_sequence
    return RowBatch(
        ids_ST=padded("ids", pad_id),
        positions_ST=padded("positions", 0) if branched else None,
        group_ST=padded("groups", PADDING) if branched else None,
        branch_ST=padded("branches", 0) if branched else None,
        sequence_N=where[:, 0],
        place_N=where[:, 1],
        response_ids_BR=pad([row.response_ids for row in rows], pad_id, torch.long).to(device),
        mask_BR=pad([[1] * len(row.response_ids) for row in rows], 0, torch.bool).to(device),
        num_tokens=sum(map(num_tokens, bundles)),
        audio=tuple(audio[utterance_id] for utterance_id in ids),
        audio_index=tuple(position[bundle[0].utterance_id] for bundle in bundles) if audio else (),
    )


@dataclass
class _Sequence:
    """A sequence in the making: one entry of each list per token."""

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    branches: list[int] = field(default_factory=list)

    def add(self, bundle: Bundle, group: int, index: int) -> Iterator[tuple[int, list[tuple[int, int]]]]:
        """Append a prompt and its responses. Yields each row's identity and (sequence, place) of its predictors."""
        prompt = bundle[0].prompt_ids
        self._extend(prompt, 0, group, 0)
        last = len(self.ids) - 1  # predicts the first token of every response
        for branch, row in enumerate(bundle, start=1):
            start = len(self.ids)
            self._extend(row.response_ids, len(prompt), group, branch)
            yield id(row), [(index, place) for place in (last, *range(start, len(self.ids) - 1))]

    def _extend(self, ids: Sequence[int], position: int, group: int, branch: int) -> None:
        self.ids += ids
        self.positions += range(position, position + len(ids))
        self.groups += [group] * len(ids)
        self.branches += [branch] * len(ids)


def pad(
    sequences: Sequence[Sequence[float]], value: float, dtype: torch.dtype, multiple: int = 1, left: bool = False
) -> Tensor:
    """[B, longest, rounded up to a multiple]: sequences padded with `value` on the right, or on the left."""
    width = -(-max(len(sequence) for sequence in sequences) // multiple) * multiple
    out = torch.full((len(sequences), width), value, dtype=dtype)
    cells = out.numpy()  # the same memory; numpy reads lists several times faster
    for row, sequence in enumerate(sequences):
        start = width - len(sequence) if left else 0
        cells[row, start : start + len(sequence)] = sequence
    return out


def stacked(rows: Sequence[Sequence[float]], like_BR: Tensor) -> Tensor:
    """[B, R] with each row's values at its start and 0 behind."""
    return pad(rows, 0.0, torch.float32).to(like_BR.device)
