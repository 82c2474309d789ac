"""A rank that holds a model without an optimiser: it encodes, samples and scores. The reference and evaluation use it;
the policy rank builds on it.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from speechrl.models.attention import FLEX_BLOCK, why_not_shared_prefix
from speechrl.models.families import Features
from speechrl.models.feature_cache import FeatureCache, check_feature_cache, encoder_context
from speechrl.models.load import encoder_digest, freeze_roles, load_model
from speechrl.models.policy import PolicyModule
from speechrl.models.prompts import Prepared, PromptBuilder
from speechrl.rollout.beam import beam_search
from speechrl.rollout.engine import Completion, EngineInput, EngineSpec, Sampling, Share
from speechrl.rollout.native import sample
from speechrl.sections import Role, Runtime, Selection, Train, Vllm
from speechrl.training import memory
from speechrl.training.batch import Packing, collate, micro_batches, rows_of
from speechrl.training.weight_sync import TRANSFERS, Route, buckets, engine_config
from speechrl.types import Group, Prompt, Rollout, TrainGroup, Utterance

ENCODE_BATCH = 16  # utterances a forward pass of the encoder takes


class InferenceRank:
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
        freeze: Sequence[Role] = ("encoder",),
        num_ctc_units: int = 0,
        rank: int = 0,
    ):
        self.device = pick_device(runtime.device)
        if self.device.type == "cpu":
            torch.set_num_threads(runtime.threads_per_rank)
        quiet_libraries()
        self.path, self.dtype, self.rank = model, dtype, rank
        self.loaded = load_model(model, dtype, runtime.attn_implementation, runtime.trust_remote_code)
        self.loaded.model.to(self.device)
        self.parameter_counts = freeze_roles(self.loaded.model, self.loaded.family, freeze)
        # outputs on disk make features in memory useless, and wrong for a file that changes during the run
        self.builder = PromptBuilder(
            self.loaded, data.instruction, data.force_language, keep_features=not data.feature_cache
        )
        self.module = PolicyModule(self.loaded, self.builder.banned_ids, "encoder" not in freeze, num_ctc_units)
        self.family = self.loaded.family
        self.no_shared_prefix = why_not_shared_prefix(self.module.decoder)
        self.weights_version = 0
        self._encoded: dict[str, Tensor] = {}  # utterance id -> encoder output [A, D]
        self._keys: dict[str, str] = {}  # utterance id -> key in the feature cache
        self.num_encoder_passes = 0
        self.sync_group: Any = None  # of NCCL, with the engines' workers, where weights travel that way
        self.feature_cache = self._open_feature_cache(data, runtime.num_ranks)

    def _open_feature_cache(self, data: Selection, num_ranks: int) -> FeatureCache | None:
        check_feature_cache(data, self.family)
        if not data.feature_cache:
            return None
        assert self.module.encoder_is_frozen, "the config refuses a cache of what trains"
        context = encoder_context(self.loaded, self.module.encoder)
        # twice: a reference with another encoder has as many ranks that write
        return FeatureCache(data.feature_cache, int(data.feature_cache_gb * 2**30), context, 2 * num_ranks)

    # --- encoding ---------------------------------------------------------------------------------------------------

    def prepare(self, utterances: Sequence[Utterance]) -> list[Prepared]:
        """Prompts, and features where the encoder must run. Raises ValueError naming the utterance that can't be
        prepared.
        """
        return [self.builder.prepare(utterance, self._recall(utterance)) for utterance in utterances]

    def _recall(self, utterance: Utterance) -> int | None:
        """Number of encoder outputs of an utterance that are at hand, in memory or in the feature cache; None where
        they must be computed, and without a cache.
        """
        cache, name = self.feature_cache, utterance.id
        if cache is None or utterance.audio is None:
            return None
        if name not in self._encoded:
            # the key is taken before the file is decoded: what is kept under it is never older than it
            self._keys[name] = cache.key(utterance.audio, utterance.where)
            if (output := cache.get(self._keys[name])) is not None:
                self._encoded[name] = output.to(self.device)
        return len(self._encoded[name]) if name in self._encoded else None

    def encode(self, prepared: Sequence[Prepared], module: PolicyModule | None = None) -> dict[str, Tensor]:
        """Encoder output [A, D] of each utterance: run once, kept until `forget`. `module` holds whole weights."""
        if not self.family.has_audio:
            return {}
        missing = {p.prompt.utterance.id: p.features for p in prepared if p.prompt.utterance.id not in self._encoded}
        order = sorted(missing, key=lambda key: missing[key].num_frames)  # type: ignore[union-attr]
        for start in range(0, len(order), ENCODE_BATCH):
            ids = order[start : start + ENCODE_BATCH]
            features: list[Features] = [missing[key] for key in ids]  # type: ignore[misc]
            outputs = dict(zip(ids, (module or self.module).encode(features), strict=True))
            self._encoded.update(outputs)
            self.num_encoder_passes += len(ids)
            if self.feature_cache is not None:
                for key, output in outputs.items():
                    self.feature_cache.put(self._keys[key], output)
        return {p.prompt.utterance.id: self._encoded[p.prompt.utterance.id] for p in prepared}

    def encoded(self, utterances: Sequence[Utterance]) -> dict[str, Tensor]:
        """As `encode`; what another rank encoded is neither decoded nor encoded again."""
        if not self.family.has_audio:
            return {}
        self.encode(self.prepare([utterance for utterance in utterances if utterance.id not in self._encoded]))
        return {utterance.id: self._encoded[utterance.id] for utterance in utterances}

    def encoder_outputs(self, utterances: Sequence[Utterance]) -> dict[str, Tensor]:
        """What `encode` kept, on the CPU, for ranks that hold the same frozen encoder; nothing if it trains."""
        if not self.module.encoder_is_frozen:
            return {}
        return {key: value.cpu() for key, value in self.encode(self.prepare(utterances)).items()}

    def take_encoder_outputs(self, outputs: Mapping[str, Tensor]) -> None:
        """Keep encoder outputs that another rank computed with the same weights."""
        self._encoded.update({key: value.to(self.device) for key, value in outputs.items()})

    def forget(self) -> None:
        """Drop the encoder outputs kept in memory."""
        self._encoded.clear()
        self._keys.clear()

    def take_cache_counts(self) -> dict[str, int]:
        """Lookups in the feature cache since the last call: hits, misses and corrupt entries; empty without one."""
        return asdict(self.feature_cache.take_counts()) if self.feature_cache is not None else {}

    # --- sampling ---------------------------------------------------------------------------------------------------

    @contextmanager
    def sampling_module(self) -> Iterator[PolicyModule]:
        """The module to sample with: whole weights, no hooks that need other ranks."""
        yield self.module

    def generate(self, utterances: Sequence[Utterance], sampling: Sampling) -> list[Group]:
        """One group per utterance, in their order."""
        prepared = self.prepare(utterances)
        with self.sampling_module() as module:
            encoded = self.encode(prepared, module)
            # neighbours of like length are sampled together; the results go back into the order asked for
            order = sorted(range(len(prepared)), key=lambda index: len(prepared[index].prompt.token_ids))
            prompts = [prepared[index].prompt for index in order]
            audio = [encoded[prompt.utterance.id] for prompt in prompts] if encoded else []
            search = beam_search if sampling.num_beams > 1 else sample
            longest = max((len(prompt.token_ids) for prompt in prompts), default=0)
            what = (
                f"sampling {sampling.num_samples} completions of each of {sampling.batch_size} prompts at a time, the "
                f"longest prompt {longest} tokens"
            )
            with memory.told(lambda: what, memory.SAMPLING):
                completions = search(module, prompts, audio, sampling, self.builder.stop_ids, self.builder.pad_id)
        groups = {
            index: self.group_of(prompt, group, self.weights_version)
            for index, prompt, group in zip(order, prompts, completions, strict=True)
        }
        return [groups[index] for index in range(len(groups))]

    def group_of(self, prompt: Prompt, completions: Sequence[Completion], weights_version: int) -> Group:
        """The completions of one prompt with their texts."""
        rollouts = []
        for item in completions:
            raw, text, language = self.builder.decode(item.token_ids, prompt.utterance)
            rollouts.append(
                Rollout(item.token_ids, item.logprobs, item.finish_reason, weights_version, raw, text, language)
            )
        return Group(prompt, tuple(rollouts))

    # --- engines that hold the language model alone -----------------------------------------------------------------

    def engine_spec(self, options: Vllm, sleeps: bool) -> EngineSpec:
        """What an engine must know of this rank's language model."""
        return EngineSpec(
            hf_config=engine_config(self.loaded.model.config, self.family),
            dtype=self.dtype,
            num_audio_rows=options.max_audio_tokens if self.family.has_audio else 0,
            max_model_len=options.max_model_len,
            banned_ids=self.builder.banned_ids,
            stop_ids=self.builder.stop_ids,
            sleeps=sleeps,
        )

    @torch.no_grad()
    def engine_inputs(self, utterances: Sequence[Utterance]) -> Share:
        """Prompts for an engine that holds the language model alone, with projected audio on the CPU."""
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
        return Share(inputs, torch.cat(audio).cpu(), time.monotonic() - started)

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
        flex = shared and (options.packed_attention == "flex" or (options.packed_attention == "auto" and cuda))
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
        """SHA-256 of the encoder's weights; empty for text."""
        return encoder_digest(self.module.encoder) if self.family.has_audio and self.module.encoder_is_frozen else ""


def pick_device(device: str) -> torch.device:
    """Raises ValueError when CUDA is asked for and there is none."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--actor.device cuda: torch sees no GPU; use --actor.device cpu")
    return torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")


def quiet_libraries() -> None:
    """Ranks print their own progress; the libraries' bars and notices would only repeat it once a rank."""
    from transformers.utils import logging as hf_logging

    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
