"""Beam search by transformers' own `generate`, over the policy's own embeddings and softmax.

Beams are ranked by their mean log-prob per token (length penalty 1, transformers' default).

Shapes: P prompts, B rows, T tokens of a prompt, R tokens of a response.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import GenerationConfig

from speechrl.models.policy import PolicyModule
from speechrl.rollout.engine import Completion, Sampling
from speechrl.rollout.native import padded_prompts
from speechrl.training.batch import Packing, Row, collate
from speechrl.types import Prompt


@torch.no_grad()
def beam_search(
    module: PolicyModule,
    prompts: Sequence[Prompt],
    audio: Sequence[Tensor],
    sampling: Sampling,
    stop_ids: Sequence[int],
    pad_id: int,
) -> list[list[Completion]]:
    """The best of `sampling.num_beams` beams of each prompt, alone in its group. Arguments as of native.sample."""
    groups: list[list[Completion]] = []
    for start in range(0, len(prompts), sampling.batch_size):
        chunk = slice(start, start + sampling.batch_size)
        ids = _search_batch(module, prompts[chunk], audio[chunk], sampling, stop_ids, pad_id)
        logprobs = _logprobs(module, prompts[chunk], audio[chunk], ids, pad_id)
        for tokens, values in zip(ids, logprobs, strict=True):
            groups.append([Completion(tokens, values, "stop" if tokens[-1] in stop_ids else "length")])
    return groups


def _search_batch(
    module: PolicyModule,
    prompts: Sequence[Prompt],
    audio: Sequence[Tensor],
    sampling: Sampling,
    stop_ids: Sequence[int],
    pad_id: int,
) -> list[tuple[int, ...]]:
    device = module.model.get_input_embeddings().weight.device
    ids_PT, mask_PT = padded_prompts(prompts, pad_id, device)
    config = GenerationConfig(
        num_beams=sampling.num_beams,
        do_sample=False,
        max_new_tokens=sampling.max_new_tokens,
        eos_token_id=list(stop_ids),
        pad_token_id=pad_id,
        suppress_tokens=list(module.banned_ids) or None,
        renormalize_logits=True,  # banned ids are left out of the softmax, not only of the choice
    )
    with _generation_config(module, config):
        found_PR = module.model.generate(
            inputs_embeds=module.embed(ids_PT, list(audio), range(len(audio))), attention_mask=mask_PT
        )
    return [_up_to_stop(row, stop_ids) for row in found_PR.tolist()]


@contextmanager
def _generation_config(module: PolicyModule, config: GenerationConfig) -> Iterator[None]:
    """In the model's place for a while: `generate` takes from the model's own whatever a given one leaves open, such as
    a repetition penalty.
    """
    kept, module.model.generation_config = module.model.generation_config, config
    try:
        yield
    finally:
        module.model.generation_config = kept


def _up_to_stop(tokens: Sequence[int], stop_ids: Sequence[int]) -> tuple[int, ...]:
    """Without the padding behind the first stop token."""
    end = next((index + 1 for index, token in enumerate(tokens) if token in stop_ids), len(tokens))
    return tuple(tokens[:end])


def _logprobs(
    module: PolicyModule,
    prompts: Sequence[Prompt],
    audio: Sequence[Tensor],
    ids: Sequence[tuple[int, ...]],
    pad_id: int,
) -> list[tuple[float, ...]]:
    """Of each token: one forward pass, as keeping the search's scores of every step would take far more memory."""
    device = module.model.get_input_embeddings().weight.device
    names = [str(index) for index in range(len(prompts))]
    rows = [Row(name, prompt.token_ids, tokens) for name, prompt, tokens in zip(names, prompts, ids, strict=True)]
    batch = collate(
        rows, dict(zip(names, audio, strict=True)) if audio else {}, pad_id, device, Packing(shared_prefix=False)
    )
    values_BR = module(batch)[0].tolist()
    return [tuple(values[: len(tokens)]) for values, tokens in zip(values_BR, ids, strict=True)]
