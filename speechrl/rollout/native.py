"""Sampling by the policy's own forward pass, with a key-value cache. The reference that other engines must equal.

A token is drawn by inverting the distribution's cumulative sum at one uniform number, and every row has its own stream
of uniform numbers, so a row's completion does not depend on what else is in the batch.

Shapes: B rows, T tokens, V vocabulary, P prompts, G samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache

from speechrl.models.policy import PolicyModule
from speechrl.rollout.engine import Completion, Sampling
from speechrl.training.batch import pad
from speechrl.types import Prompt


@torch.no_grad()
def sample(
    module: PolicyModule,
    prompts: Sequence[Prompt],
    audio: Sequence[Tensor],
    sampling: Sampling,
    stop_ids: Sequence[int],
    pad_id: int,
) -> list[list[Completion]]:
    """G completions per prompt. `audio` holds the encoder output [A, D] of each prompt, or nothing for text."""
    groups: list[list[Completion]] = []
    for start in range(0, len(prompts), sampling.batch_size):
        chunk = slice(start, start + sampling.batch_size)
        groups += _sample_batch(module, prompts[chunk], audio[chunk], sampling, stop_ids, pad_id)
    return groups


def _sample_batch(
    module: PolicyModule,
    prompts: Sequence[Prompt],
    audio: Sequence[Tensor],
    sampling: Sampling,
    stop_ids: Sequence[int],
    pad_id: int,
) -> list[list[Completion]]:
    device = module.model.get_input_embeddings().weight.device
    state = _prefill(module, prompts, audio, sampling, pad_id, device)
    uniforms_BT = torch.stack(
        [_uniforms(prompt, index, sampling) for prompt in prompts for index in range(sampling.num_samples)]
    ).to(device)
    stops = torch.tensor(list(stop_ids), device=device)
    rows = len(prompts) * sampling.num_samples
    tokens: list[list[int]] = [[] for _ in range(rows)]
    logprobs: list[list[float]] = [[] for _ in range(rows)]
    live_B = torch.arange(rows, device=device)  # the rows that the cache still holds
    for step in range(sampling.max_new_tokens):
        logprobs_BV = module.logprobs_of(state.hidden_BH, sampling.temperature or 1.0)
        chosen_B, chosen_logprobs_B = _choose(logprobs_BV, uniforms_BT[live_B, step], sampling)
        for row, token, logprob in zip(live_B.tolist(), chosen_B.tolist(), chosen_logprobs_B.tolist(), strict=True):
            tokens[row].append(token)
            logprobs[row].append(logprob)
        going_B = ~torch.isin(chosen_B, stops)
        if not bool(going_B.any()) or step + 1 == sampling.max_new_tokens:
            break
        keep_B = going_B.nonzero()[:, 0]
        state.keep(keep_B)
        live_B = live_B[keep_B]
        state.advance(module, chosen_B[keep_B])
    ends = set(stop_ids)
    done = [
        Completion(tuple(ids), tuple(logs), "stop" if ids[-1] in ends else "length")
        for ids, logs in zip(tokens, logprobs, strict=True)
    ]
    size = sampling.num_samples
    return [done[start : start + size] for start in range(0, rows, size)]


@dataclass
class _State:
    """The cache, the last hidden states [B, H], the mask [B, T] and the next positions [B, 1] of the live rows."""

    cache: DynamicCache
    hidden_BH: Tensor
    mask_BT: Tensor
    positions_B1: Tensor

    def keep(self, index_B: Tensor) -> None:
        if len(index_B) == len(self.mask_BT):
            return
        self.cache.batch_select_indices(index_B)
        self.mask_BT, self.positions_B1 = self.mask_BT[index_B], self.positions_B1[index_B]

    def advance(self, module: PolicyModule, ids_B: Tensor) -> None:
        self.mask_BT = torch.cat([self.mask_BT, self.mask_BT.new_ones(len(ids_B), 1)], dim=1)
        out = module.decoder(
            inputs_embeds=module.model.get_input_embeddings()(ids_B[:, None]),
            attention_mask=self.mask_BT,
            position_ids=self.positions_B1,
            past_key_values=self.cache,
            use_cache=True,
        )
        self.hidden_BH = out.last_hidden_state[:, -1]
        self.positions_B1 = self.positions_B1 + 1


def padded_prompts(prompts: Sequence[Prompt], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(token ids, mask) [P, T], padded on the left: what comes next lies in one column."""
    ids = [prompt.token_ids for prompt in prompts]
    return (
        pad(ids, pad_id, torch.long, left=True).to(device),
        pad([[1] * len(row) for row in ids], 0, torch.long, left=True).to(device),
    )


def _prefill(
    module: PolicyModule,
    prompts: Sequence[Prompt],
    audio: Sequence[Tensor],
    sampling: Sampling,
    pad_id: int,
    device: torch.device,
) -> _State:
    """Each prompt once; its cache is then repeated for the G rows of its group."""
    ids_PT, mask_PT = padded_prompts(prompts, pad_id, device)
    positions_PT = (mask_PT.cumsum(1) - 1).clamp(min=0)
    cache = DynamicCache()
    out = module.decoder(
        inputs_embeds=module.embed(ids_PT, list(audio), range(len(audio))),
        attention_mask=mask_PT,
        position_ids=positions_PT,
        past_key_values=cache,
        use_cache=True,
    )
    size = sampling.num_samples
    hidden_BH, mask_BT = out.last_hidden_state[:, -1], mask_PT
    if size > 1:
        cache.batch_repeat_interleave(size)
        hidden_BH, mask_BT = hidden_BH.repeat_interleave(size, 0), mask_PT.repeat_interleave(size, 0)
    return _State(cache, hidden_BH, mask_BT, mask_BT.sum(1, keepdim=True))


def _choose(logprobs_BV: Tensor, uniforms_B: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Token ids [B] and their log-probs [B] under the distribution that they were drawn from."""
    if sampling.temperature == 0:
        best = logprobs_BV.max(-1)
        return best.indices, best.values
    if sampling.top_k or sampling.top_p < 1:
        logprobs_BV = _truncate(logprobs_BV, sampling)
    cumulative_BV = logprobs_BV.double().exp().cumsum(-1)
    # the target stays below the total, and `right` skips tokens of probability 0
    targets_B1 = (uniforms_B * cumulative_BV[:, -1])[:, None]
    ids_B = torch.searchsorted(cumulative_BV, targets_B1, right=True)[:, 0].clamp(max=logprobs_BV.shape[-1] - 1)
    return ids_B, logprobs_BV.gather(-1, ids_B[:, None])[:, 0]


def _truncate(logprobs_BV: Tensor, sampling: Sampling) -> Tensor:
    """Keep the top_k likeliest tokens and of those the smallest set with mass top_p; renormalise."""
    ordered = logprobs_BV.sort(-1, descending=True)
    mass_BV = ordered.values.exp().cumsum(-1)
    drop_BV = mass_BV - ordered.values.exp() >= sampling.top_p
    if sampling.top_k:
        drop_BV[:, sampling.top_k :] = True
    kept_BV = ordered.values.masked_fill(drop_BV, float("-inf"))
    return torch.empty_like(kept_BV).scatter_(-1, ordered.indices, kept_BV).log_softmax(-1)


def _uniforms(prompt: Prompt, index: int, sampling: Sampling) -> Tensor:
    """[max_new_tokens] float64 in [0, 1): the row's own stream."""
    stream = torch.Generator().manual_seed(sampling.seed_of(prompt.utterance.id, index))
    return torch.rand(sampling.max_new_tokens, dtype=torch.float64, generator=stream)
