"""The policy's weights to the rollout engines: what is sent, under which names, in which buckets, by which way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.exceptions import RayActorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from speechrl.models.family import Family
from speechrl.rollout.vllm import wait_for_engines
from speechrl.rollout.weights import Bucket, lend, pack
from speechrl.training import deepspeed_engine


def engine_config(model: Any, family: Family) -> dict[str, Any]:
    """The Hugging Face config of a model's language model alone. Raises ValueError where transformers has no such
    class.
    """
    text, name = engine_class(model.config, family)
    values = text.to_dict()
    values["architectures"] = [name]
    values["tie_word_embeddings"] = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    return values


def engine_class(config: Any, family: Family) -> tuple[Any, str]:
    """(config, class name) of the language model alone. Raises ValueError where transformers has no such class."""
    text = (family.text_config or PreTrainedConfig.get_text_config)(config)
    if type(text) not in AutoModelForCausalLM._model_mapping:
        raise ValueError(
            f"the engine vllm: {family.name} has a language model of type {text.model_type!r}, which is no causal "
            "language model of its own; use --rollout.engine native (--eval.engine native in an evaluation)"
        )
    return text, AutoModelForCausalLM._model_mapping[type(text)].__name__


def engine_name(name: str, family: Family) -> str | None:
    """A parameter of the policy module under the name in a checkpoint of the language model; None for other parts."""
    name = name.removeprefix("model.")
    if not family.has_audio:
        return name
    trunk, head = family.roles["language_model"]
    if name.startswith(trunk + "."):
        return "model." + name.removeprefix(trunk + ".")
    return name if name.startswith(head + ".") else None


def buckets(
    module: nn.Module, family: Family, trained_only: bool, bucket_bytes: int
) -> Iterator[list[tuple[str, Tensor]]]:
    """The language model's weights, whole, each bucket valid until the next. Collective under ZeRO-3: iterate on every
    rank.

    trained_only: leave out what no optimiser moves.
    """
    named: Mapping[str, Tensor] = dict(module.named_parameters())  # tied weights once
    wanted = {
        renamed: parameter
        for name, parameter in named.items()
        if (renamed := engine_name(name, family)) and (parameter.requires_grad or not trained_only)
    }
    yield from deepspeed_engine.whole_buckets(wanted, bucket_bytes)


# --- ways to travel -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Route:
    """Where buckets go: engines' actors that have started an update, and the NCCL group with their workers if any.

    is_sender: policy rank 0, the only rank that talks to engines. faults: after the first nothing more is sent, but the
    ranks go through all buckets together, for they gather them together.
    """

    engines: Sequence[Any]
    timeout_s: float
    is_sender: bool
    group: Any = None
    faults: list[Exception] = field(default_factory=list)

    def call(self, bucket: Bucket) -> list[Any]:
        if self.faults:
            return []
        arguments = ray.put(bucket)  # once, not once an engine
        return [engine.load_bucket.remote(arguments) for engine in self.engines]

    def wait(self, answers: Sequence[Any]) -> None:
        """Until the engines have the bucket; a fault is kept for `raise_fault`."""
        try:
            wait_for_engines(answers, self.timeout_s, "take the weights")
        except (RuntimeError, TimeoutError, RayActorError) as error:
            self.faults.append(error)

    def raise_fault(self) -> None:
        """The first fault, once all buckets have gone by."""
        if self.faults:
            raise self.faults[0]


def send_host(weights: Sequence[tuple[str, Tensor]], route: Route) -> int:
    """Through the memory of the host, with the call."""
    if not route.is_sender:
        return 0
    bucket, flat = pack(weights)
    route.wait(route.call(replace(bucket, flat=flat.cpu())))
    return bucket.num_bytes


def send_ipc(weights: Sequence[tuple[str, Tensor]], route: Route) -> int:
    """To engines on the policy's own GPUs: each rank lends its copy, an engine's worker takes that of its GPU."""
    bucket, flat = pack(weights)
    torch.cuda.synchronize()
    handle = {str(torch.cuda.get_device_properties(flat.device).uuid): lend(flat)}
    handles: list[dict[str, tuple]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(handles, handle)
    if route.is_sender:
        merged = {uuid: arguments for item in handles for uuid, arguments in item.items()}
        route.wait(route.call(replace(bucket, ipc_handles=merged)))
    dist.barrier()  # nobody frees what an engine still reads
    return bucket.num_bytes


def send_nccl(weights: Sequence[tuple[str, Tensor]], route: Route) -> int:
    """By broadcast to engines on other GPUs."""
    if not route.is_sender:
        return 0
    bucket, flat = pack(weights)
    if answers := route.call(bucket):
        route.group.broadcast(flat, src=0, stream=torch.cuda.current_stream())
        route.wait(answers)
    return bucket.num_bytes


TRANSFERS: dict[str, Callable[[Sequence[tuple[str, Tensor]], Route], int]] = {
    "host": send_host,
    "ipc": send_ipc,
    "nccl": send_nccl,
}
