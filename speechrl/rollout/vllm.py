"""vLLM as the rollout engine: actors that sample, and the handle that feeds them and keeps their weights new."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import ray
from torch import Tensor

from speechrl.rollout import vllm_api
from speechrl.rollout.engine import Completion, EngineInput, EngineSpec, Sampling
from speechrl.sections import Vllm
from speechrl.types import Group, Prompt, Utterance


class VllmServer:
    """One engine, in a Ray actor of its own."""

    def __init__(self, spec: EngineSpec, options: Vllm, seed: int):
        self.spec = spec
        self.llm = vllm_api.make_llm(spec, options, seed)
        self.weights_version = -1  # of no policy

    def describe(self) -> dict:
        return {"max_model_len": self.spec.max_model_len, "weights_version": self.weights_version}

    def generate(
        self, sampling: Sampling, *shares: list[EngineInput]
    ) -> tuple[int, list[tuple[Prompt, list[Completion]]]]:
        """(weights version, completions of each prompt), share after share. All are one batch to the engine."""
        inputs = [item for share in shares for item in share]
        for item in inputs:
            self._check_length(item.prompt, sampling.max_new_tokens)
        completions = vllm_api.complete(self.llm, inputs, self.spec, sampling)
        return self.weights_version, [(item.prompt, group) for item, group in zip(inputs, completions, strict=True)]

    def _check_length(self, prompt: Prompt, max_new_tokens: int) -> None:
        if len(prompt.token_ids) + max_new_tokens > self.spec.max_model_len:
            raise ValueError(
                f"{prompt.utterance.where}: the prompt of {prompt.utterance.id} has {len(prompt.token_ids)} tokens; "
                f"with {max_new_tokens} new ones it is longer than --vllm.max_model_len {self.spec.max_model_len}"
            )

    def start_update(self) -> None:
        vllm_api.start_update(self.llm)

    def load_bucket(self, weights: list[tuple[str, Tensor]]) -> None:
        # Ray's arrays are read-only views of shared memory; vLLM may keep what it is given
        vllm_api.load_bucket(self.llm, [(name, tensor.clone()) for name, tensor in weights])

    def finish_update(self, weights_version: int) -> None:
        vllm_api.finish_update(self.llm)
        self.weights_version = weights_version


class VllmEngine:
    """The engines as one RolloutEngine. Prompts are made by the policy ranks, which hold encoder and projector.

    Embeddings go from rank to engine as Ray references, not through the driver.
    """

    def __init__(self, servers: Sequence[Any], policy: Any, options: Vllm):
        self.servers, self.policy, self.options = list(servers), policy, options
        self.weights_version = -1

    def generate(self, utterances: Sequence[Utterance], sampling: Sampling) -> list[Group]:
        """One group per utterance, in their order. Raises RuntimeError when an engine has died or has old weights."""
        ranks, engines = self.policy.ranks, self.servers
        # utterance i is encoded on rank i mod R; an engine gets a part of every rank's share
        parts: dict[tuple[int, int], list[int]] = {}
        for index, utterance in enumerate(utterances):
            rank = index % len(ranks)
            self.policy.home[utterance.id] = rank
            parts.setdefault(((index // len(ranks)) % len(engines), rank), []).append(index)
        groups: list[Any] = [None] * len(utterances)
        pending = []
        for number, engine in enumerate(engines):
            mine = {rank: indices for (owner, rank), indices in sorted(parts.items()) if owner == number}
            if mine:
                inputs = [
                    ranks[rank].engine_inputs.remote([utterances[index] for index in indices])
                    for rank, indices in mine.items()
                ]
                order = [index for indices in mine.values() for index in indices]
                pending.append((number, order, engine.generate.remote(sampling, *inputs)))
        for number, order, answer in pending:
            version, sampled = self._get(number, answer)
            if version != self.weights_version:
                raise RuntimeError(
                    f"vLLM engine {number} sampled with weights of version {version}, the policy has "
                    f"{self.weights_version}"
                )
            done = ray.get(ranks[number % len(ranks)].groups_of.remote(sampled, version))
            for index, group in zip(order, done, strict=True):
                groups[index] = group
        return groups

    def _get(self, number: int, answer: Any) -> Any:
        try:
            return ray.get(answer)
        except ray.exceptions.RayActorError as error:
            raise RuntimeError(
                f"vLLM engine {number} died: {error}; --ckpt.resume continues from the last checkpoint"
            ) from error

    def sync(self) -> dict[str, float]:
        """The policy's newest weights into every engine: all of them the first time, then what trains."""
        started = time.monotonic()
        first = self.weights_version < 0
        timeout_s = self.options.sync_timeout_s
        answer_all([server.start_update for server in self.servers], timeout_s)
        sent = [rank.send_weights.remote(self.servers, not first, self.options) for rank in self.policy.ranks]
        version, num_bytes = ray.get(sent)[0]
        answer_all([server.finish_update for server in self.servers], timeout_s, version)
        self.weights_version = version
        return {"time/sync_s": time.monotonic() - started, "sync/megabytes": num_bytes / 2**20}

    def forget(self) -> None:
        self.policy.forget()


def answer_all(methods: Sequence[Any], timeout_s: float, *arguments: Any) -> None:
    """Call a method of every engine and wait. Raises TimeoutError, or RuntimeError with the engine's own text."""
    calls = [method.remote(*arguments) for method in methods]
    try:
        ray.get(calls, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError:
        raise TimeoutError(
            f"a vLLM engine did not take the weights within --vllm.sync_timeout_s {timeout_s:.0f}"
        ) from None
    except (ray.exceptions.RayActorError, ray.exceptions.RayTaskError) as error:
        raise RuntimeError(f"a vLLM engine failed to take the weights: {error}") from error
