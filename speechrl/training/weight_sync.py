"""The policy's weights to the rollout engines: what is sent, under which names, bucket by bucket."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

from speechrl.models.families import Family
from speechrl.training import deepspeed_engine


def engine_config(config: PreTrainedConfig, family: Family) -> dict[str, Any]:
    """The Hugging Face config of the language model alone. Raises ValueError where transformers has no such class."""
    text = config.get_text_config()
    if type(text) not in AutoModelForCausalLM._model_mapping:
        raise ValueError(f"--rollout.engine vllm: {family.name} has a language model of type {text.model_type!r}, "
                         "which is no causal language model of its own; use --rollout.engine native")  # fmt: skip
    values = text.to_dict()
    values["architectures"] = [AutoModelForCausalLM._model_mapping[type(text)].__name__]
    values["tie_word_embeddings"] = config.tie_word_embeddings
    return values


def engine_name(name: str, family: Family) -> str | None:
    """A parameter of the policy module under the name in a checkpoint of the language model; None for other parts."""
    name = name.removeprefix("model.")
    if not family.has_audio:
        return name
    trunk, head = family.roles["language_model"]
    if name.startswith(trunk + "."):
        return "model." + name.removeprefix(trunk + ".")
    return name if name.startswith(head + ".") else None


def buckets(engine: Any, family: Family, trained_only: bool, bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """The language model's weights on the CPU, whole, in buckets. Collective under ZeRO-3: iterate on every rank.

    trained_only: leave out what no optimiser moves.
    """
    named: Mapping[str, Tensor] = dict(engine.module.named_parameters())  # tied weights once
    wanted = {
        renamed: parameter
        for name, parameter in named.items()
        if (renamed := engine_name(name, family)) and (parameter.requires_grad or not trained_only)
    }
    yield from deepspeed_engine.whole_buckets(wanted, bucket_bytes)


def num_bytes(bucket: Sequence[tuple[str, Tensor]]) -> int:
    return sum(tensor.nbytes for _, tensor in bucket)
