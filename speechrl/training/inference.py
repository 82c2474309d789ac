"""A rank that holds a model without an optimiser: it encodes, samples and scores. The reference and evaluation use it;
the policy rank builds on it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from speechrl.models.attention import FLEX_BLOCK, why_not_flex, why_not_shared_prefix
from speechrl.models.load import encoder_digest, freeze_roles, load_model, quiet_libraries
from speechrl.models.policy import PolicyModule
from speechrl.models.speech_prompts import prompt_builder
from speechrl.rollout.beam import beam_search
from speechrl.rollout.engine import Completion, EngineInput, EngineSpec, Placed, Sampling, Share, in_order
from speechrl.rollout.native import sample
from speechrl.sections import Held, Runtime, Selection, Train, Vllm
from speechrl.training import memory
from speechrl.training.batch import Packing, collate, micro_batches, rows_of
from speechrl.training.encoding import EncodingRank
from speechrl.training.weight_sync import TRANSFERS, Route, buckets, engine_config
from speechrl.types import Group, Prompt, Rollout, TrainGroup, Utterance


class InferenceRank(EncodingRank):
    """One model on one device.

    model: folder. freeze: roles that hold still; a frozen encoder runs once per utterance. num_ctc_units: see
    PolicyModule. rank: place among the ranks of a group; rank 0 sends weights to engines.
    """

    def __init__(
        self,
        model: str,
        runtime: Runtime,
        data: Selection,
        dtype: str,
        freeze: Sequence[Held] = ("encoder",),
        num_ctc_units: int = 0,
        rank: int = 0,
    ):
        device = pick_device(runtime.device)
        if device.type == "cpu":
            torch.set_num_threads(runtime.threads_per_rank)
        else:  # cuDNN plans attention anew for every shape, and no two batches have the same: half of a step of SFT
            torch.backends.cuda.enable_cudnn_sdp(False)
        quiet_libraries()
        self.path, self.dtype, self.rank = model, dtype, rank
        self.loaded = load_model(model, dtype, runtime.attn_implementation, runtime.trust_remote_code)
        self.loaded.model.to(device)
        self.parameter_counts = freeze_roles(self.loaded.model, self.loaded.family, freeze)
        # outputs on disk make features in memory useless, and wrong for a file that changes during the run
        builder = prompt_builder(self.loaded, data, keep_features=not data.feature_cache)
        module = PolicyModule(self.loaded, builder.banned_ids, "encoder" not in freeze, num_ctc_units)
        super().__init__(self.loaded, builder, module, runtime, data)
        self.no_shared_prefix = why_not_shared_prefix(self.module.decoder)
        self.weights_version = 0
        self.sync_group: Any = None  # of NCCL, with the engines' workers, where weights travel that way

    # --- sampling ---------------------------------------------------------------------------------------------------

    @contextmanager
    def sampling_module(self) -> Iterator[PolicyModule]:
        """The module to sample with: whole weights, no hooks that need other ranks."""
        yield self.module

    def stream(self, utterances: Sequence[Utterance], sampling: Sampling) -> Iterator[list[Placed]]:
        """The groups with their places in `utterances`, batch after batch; neighbours of like length in one batch."""
        prepared = self.prepare(utterances)
        search = beam_search if sampling.num_beams > 1 else sample
        with self.sampling_module() as module:
            encoded = self.encode(prepared, module)
            order = sorted(range(len(prepared)), key=lambda place: len(prepared[place].prompt.token_ids))
            for start in range(0, len(order), sampling.batch_size):
                places = order[start : start + sampling.batch_size]
                prompts = [prepared[place].prompt for place in places]
                audio = [encoded[prompt.utterance.id] for prompt in prompts] if encoded else []
                with memory.told(partial(_sampling, prompts, sampling), memory.SAMPLING):
                    completions = search(module, prompts, audio, sampling, self.builder.stop_ids, self.builder.pad_id)
                yield [
                    (place, self.group_of(prompt, group, self.weights_version))
                    for place, prompt, group in zip(places, prompts, completions, strict=True)
                ]

    def generate(self, utterances: Sequence[Utterance], sampling: Sampling) -> list[Group]:
        """One group per utterance, in their order."""
        return in_order(self.stream(utterances, sampling))

    def group_of(self, prompt: Prompt, completions: Sequence[Completion], weights_version: int) -> Group:
        """The completions of one prompt with their texts."""
        rollouts = []
        for item in completions:
            raw, text, language = self.builder.decode(item.token_ids, prompt.utterance)
            codes = self.builder.codes_of(item.token_ids)
            rollouts.append(
                Rollout(item.token_ids, item.logprobs, item.finish_reason, weights_version, raw, text, language, codes)
            )
        return Group(prompt, tuple(rollouts))

    # --- engines that hold the language model alone -----------------------------------------------------------------

    def engine_spec(self, options: Vllm, sleeps: bool) -> EngineSpec:
        """What an engine must know of this rank's language model."""
        return EngineSpec(
            hf_config=engine_config(self.loaded.model, self.family),
            dtype=self.dtype,
            num_audio_rows=options.max_audio_tokens if self.family.has_audio else 0,
            max_model_len=options.max_model_len,
            banned_ids=self.builder.banned_ids,
            stop_ids=self.builder.stop_ids,
            sleeps=sleeps,
            allowed_ids=self.builder.allowed_ids,
        )

    @torch.no_grad()
    def engine_inputs(self, utterances: Sequence[Utterance], same_gpu: bool = False) -> Share:
        """Prompts for an engine that holds the language model alone, with projected audio on the host, or on this
        rank's GPU where the engine lives on the `same_gpu`.
        """
        started = time.monotonic()
        prepared = self.prepare(utterances)
        if not self.family.has_audio:
            return Share([EngineInput(item.prompt) for item in prepared], None, time.monotonic() - started)
        with self.sampling_module() as module:
            if not prepared:  # only here because the replica's weights are gathered by all ranks together
                return Share([], None, time.monotonic() - started)
            encoded = self.encode(prepared, module)
            audio = module.project([encoded[item.prompt.utterance.id] for item in prepared])
        inputs = [
            EngineInput(item.prompt, module.audio_id, len(rows)) for item, rows in zip(prepared, audio, strict=True)
        ]
        rows_RH = torch.cat(audio)
        if same_gpu:
            torch.cuda.current_stream().synchronize()  # encode_s is of the work, not of its launch
        else:
            rows_RH = rows_RH.cpu()
        return Share(inputs, rows_RH, time.monotonic() - started)

    def groups_of(self, sampled: Sequence[tuple[Prompt, Sequence[Completion]]], weights_version: int) -> list[Group]:
        """What an engine made of this rank's prompts, with texts."""
        return [self.group_of(prompt, completions, weights_version) for prompt, completions in sampled]

    def get_weights_version(self) -> int:
        return self.weights_version

    def send_weights(self, engines: Sequence[Any], trained_only: bool, options: Vllm, transfer: str) -> tuple[int, int]:
        """The language model's weights to engines that have started an update: rank 0 sends, under ZeRO-3 all gather.

        Returns (version, bytes). Raises TimeoutError after --vllm.sync_timeout_s, and what an engine raised.
        """
        route = Route(engines, options.sync_timeout_s, self.rank == 0, self.sync_group)
        sent = 0
        for bucket in buckets(self.module, self.family, trained_only, options.sync_bucket_mb * 2**20):
            sent += TRANSFERS[transfer](bucket, route)
        route.raise_fault()
        return self.weights_version, sent

    # --- log-probs --------------------------------------------------------------------------------------------------

    def packing(self, options: Train) -> Packing:
        """How completions of a prompt are laid out for this model on this device, and the kernel for it switched on."""
        shared = options.shared_prefix and not self.no_shared_prefix
        cuda = self.device.type == "cuda"
        auto = options.packed_attention == "auto" and not why_not_flex(self.module.decoder, self.device)
        flex = shared and (options.packed_attention == "flex" or auto)
        if flex:
            self.module.use_flex_attention()
        multiple = FLEX_BLOCK if flex else 8 if cuda else 1
        return Packing(options.micro_batch_size, options.max_tokens_per_micro_batch, shared, flex, multiple)

    @torch.no_grad()
    def logprobs(self, groups: Sequence[Group], temperature: float, options: Train) -> list[list[list[float]]]:
        """[P][G][T]: log-probs of every rollout's tokens under this rank's weights."""
        rows = rows_of([TrainGroup(group, (0.0,) * len(group.rollouts)) for group in groups])
        audio = self.encoded([group.utterance for group in groups])
        values_of: dict[int, list[float]] = {}  # by the row's identity: micro-batches mix rows of several groups
        packing = self.packing(options)
        for batch_rows in micro_batches(rows, packing):
            batch = collate(batch_rows, audio, self.builder.pad_id, self.device, packing)
            with memory.told(partial(memory.describe, "scoring", batch_rows), memory.SCORING):
                logprobs_BR, _, _ = self.module(batch, temperature)
            for row, values in zip(batch_rows, logprobs_BR.tolist(), strict=True):
                values_of[id(row)] = values[: len(row.response_ids)]
        in_order = iter([values_of[id(row)] for row in rows])
        return [[next(in_order) for _ in group.rollouts] for group in groups]

    # --- facts ------------------------------------------------------------------------------------------------------

    def describe(self) -> dict:
        """Family, device, parameter counts by role and the encoder's digest."""
        return {
            "family": self.family.name,
            "device": torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu",
            "parameters": self.parameter_counts,
            "encoder_digest": self.encoder_digest(),
            "no_shared_prefix": self.no_shared_prefix,
        }

    def encoder_digest(self) -> str:
        """SHA-256 of a frozen encoder's weights; empty where it trains, and for text."""
        if not self.module.encoder_is_frozen:
            return ""
        with self._lock:  # as frozen_state
            return encoder_digest(self.module.encoder)


def _sampling(prompts: Sequence[Prompt], sampling: Sampling) -> str:
    """What is sampled at a time, in words."""
    longest = max(len(prompt.token_ids) for prompt in prompts)
    return (
        f"sampling {sampling.num_samples} completions of each of {len(prompts)} prompts at a time, the longest prompt "
        f"{longest} tokens"
    )


def pick_device(device: str) -> torch.device:
    """Raises ValueError when CUDA is asked for and there is none."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--actor.device cuda: torch sees no GPU; use --actor.device cpu")
    return torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")
