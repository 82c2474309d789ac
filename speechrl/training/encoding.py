"""What a rank does with audio before it samples or trains: decode, featurise and encode each utterance once.

With `look_ahead` the next batch is made ready by a thread of its own, while this one is sampled, scored and trained on.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from speechrl.models.family import Features
from speechrl.models.feature_cache import FeatureCache, check_feature_cache, encoder_context
from speechrl.models.load import LoadedModel
from speechrl.models.policy import PolicyModule
from speechrl.models.prompts import Prepared, PromptBuilder
from speechrl.sections import Runtime, Selection
from speechrl.training import memory
from speechrl.types import Augmentation, Utterance

AHEAD = 2  # batches: the one that comes, and the one after it, asked for just before
ENCODE_BATCH = 16  # utterances a forward pass of the encoder takes
K = TypeVar("K")
# Id and place of an utterance, for an id alone is unique within one set only, and what is done to its audio this time.
Key = tuple[str, str, Augmentation | None]


class EncodingRank:
    """Prompts, features and encoder outputs of one model on one device. Outputs are kept until `forget`."""

    def __init__(
        self, loaded: LoadedModel, builder: PromptBuilder, module: PolicyModule, runtime: Runtime, data: Selection
    ):
        self.loaded, self.builder, self.module, self.family = loaded, builder, module, loaded.family
        self.device = next(module.parameters()).device
        self.num_encoder_passes = 0
        self.feature_cache = self._open_feature_cache(data, runtime.num_ranks)
        self._encoded: dict[str, Tensor] = {}  # utterance id -> encoder output [O, D]
        self._keys: dict[str, str] = {}  # utterance id -> key in the feature cache
        self._lock = threading.Lock()  # of the encoder, its weights and the feature cache; the builder has its own
        self._thread = ThreadPoolExecutor(1, "look_ahead")
        # one for all batches: each stream keeps memory and a cuBLAS workspace of its own
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._workers = ThreadPoolExecutor(data.num_workers, "features")
        self._ahead: deque[tuple[frozenset[Key], Future[dict[Key, Tensor]]]] = deque(maxlen=AHEAD)

    def _open_feature_cache(self, data: Selection, num_ranks: int) -> FeatureCache | None:
        check_feature_cache(data, self.family)
        if not data.feature_cache:
            return None
        assert self.module.encoder_is_frozen, "the config refuses a cache of what trains"
        context = encoder_context(self.loaded, self.module.encoder)
        # twice: a reference with another encoder has as many ranks that write
        return FeatureCache(data.feature_cache, int(data.feature_cache_gb * 2**30), context, 2 * num_ranks)

    # --- this batch -------------------------------------------------------------------------------------------------

    def prepare(self, utterances: Sequence[Utterance]) -> list[Prepared]:
        """Prompts, and features where the encoder must run. Raises ValueError naming the utterance that can't be
        prepared.
        """
        self._take_ahead(utterances)
        known = {_key(utterance): self._recall(utterance) for utterance in utterances}
        self._encoded |= moved({key: item for key, item in self._encoded.items() if item.is_cpu}, self.device)
        prepared = self._prepare_each(utterances, known)
        return [prepared[_key(utterance)] for utterance in utterances]

    def _prepare_each(
        self, utterances: Sequence[Utterance], num_outputs: Mapping[Key, int | None]
    ) -> dict[Key, Prepared]:
        """Each utterance once, several side by side."""
        unique = {_key(utterance): utterance for utterance in utterances}
        done = self._workers.map(lambda key: self.builder.prepare(unique[key], num_outputs.get(key)), unique)
        return dict(zip(unique, done, strict=True))

    def _recall(self, utterance: Utterance) -> int | None:
        """Number of encoder outputs of an utterance that are at hand, in memory or in the feature cache; None where
        they must be computed, and without a cache.
        """
        name = utterance.id
        if self.feature_cache is None or utterance.audio is None:
            return None
        if name not in self._encoded:
            self._keys[name], output = self._look_up(utterance)
            if output is not None:
                self._encoded[name] = output
        return len(self._encoded[name]) if name in self._encoded else None

    def _look_up(self, utterance: Utterance) -> tuple[str, Tensor | None]:
        """(key, output on the host) of an utterance in the feature cache. The key is taken before the file is decoded:
        what is kept under it is never older than it.
        """
        assert self.feature_cache is not None and utterance.audio is not None
        with self._lock:
            key = self.feature_cache.key(utterance.audio, utterance.where)
            return key, self.feature_cache.get(key)

    def encode(self, prepared: Sequence[Prepared], module: PolicyModule | None = None) -> dict[str, Tensor]:
        """Encoder output [O, D] of each utterance: run once, kept until `forget`. `module` holds whole weights."""
        if not self.family.has_audio:
            return {}
        self._take_ahead([item.prompt.utterance for item in prepared])
        missing = {p.prompt.utterance.id: p.features for p in prepared if p.prompt.utterance.id not in self._encoded}
        self._encoded |= self._run_encoder(missing, self._keys, module or self.module)  # type: ignore[arg-type]
        return {p.prompt.utterance.id: self._encoded[p.prompt.utterance.id] for p in prepared}

    def _run_encoder(
        self, features: Mapping[K, Features], keys: Mapping[K, str], module: PolicyModule
    ) -> dict[K, Tensor]:
        """Encoder output of each entry, neighbours of like length together; into the feature cache under its key."""
        found: dict[K, Tensor] = {}
        order = sorted(features, key=lambda name: features[name].num_frames)
        for start in range(0, len(order), ENCODE_BATCH):
            names = order[start : start + ENCODE_BATCH]
            clips = [features[name] for name in names]
            with self._lock, memory.told(partial(_encoding, clips), memory.ENCODING):
                outputs = dict(zip(names, module.encode(clips), strict=True))
                self.num_encoder_passes += len(names)
                if self.feature_cache is not None:
                    for name, output in moved(outputs, torch.device("cpu")).items():
                        self.feature_cache.put(keys[name], output)
            found |= outputs
        return found

    def encoded(self, utterances: Sequence[Utterance]) -> dict[str, Tensor]:
        """As `encode`; what is at hand, from this rank or another, is neither decoded nor encoded again."""
        if not self.family.has_audio:
            return {}
        self.encode(self.prepare([utterance for utterance in utterances if utterance.id not in self._encoded]))
        return {utterance.id: self._encoded[utterance.id] for utterance in utterances}

    def encoder_outputs(self, utterances: Sequence[Utterance]) -> dict[str, Tensor]:
        """As `encoded`, on the CPU, for ranks that hold the same frozen encoder; nothing if it trains."""
        if not self.module.encoder_is_frozen:
            return {}
        return {key: value.cpu() for key, value in self.encoded(utterances).items()}

    def take_encoder_outputs(self, outputs: Mapping[str, Tensor]) -> None:
        """Keep encoder outputs that another rank computed with the same weights."""
        self._encoded.update(moved(outputs, self.device))

    def forget(self) -> None:
        """Drop the encoder outputs kept in memory; not those of the next batch."""
        self._encoded.clear()
        self._keys.clear()

    def take_cache_counts(self) -> dict[str, int]:
        """Lookups in the feature cache since the last call: hits, misses and corrupt entries; empty without one."""
        with self._lock:
            return asdict(self.feature_cache.take_counts()) if self.feature_cache is not None else {}

    def frozen_state(self) -> dict[str, Tensor]:
        """PolicyModule.frozen_state, not in the middle of a forward pass: some families cut weights for its length."""
        with self._lock:
            return self.module.frozen_state()

    # --- the next batch ---------------------------------------------------------------------------------------------

    def look_ahead(self, utterances: Sequence[Utterance]) -> None:
        """Start to make ready what comes next, and return: features, and the outputs of a frozen encoder.

        What can't be prepared is told when it is asked for. What nobody asks for goes with the batch after the next.
        """
        ready = self._thread.submit(self._make_ready, list(utterances))
        self._ahead.append((frozenset(map(_key, utterances)), ready))

    def _make_ready(self, utterances: Sequence[Utterance]) -> dict[Key, Tensor]:
        found: dict[Key, Tensor] = {}
        features: dict[Key, Features] = {}
        cache_keys: dict[Key, str] = {}
        unknown: list[Utterance] = []
        for utterance in utterances:
            key = _key(utterance)
            if self.feature_cache is not None and utterance.audio is not None:
                cache_keys[key], output = self._look_up(utterance)
                if output is not None:
                    found[key] = output
                    continue
            unknown.append(utterance)
        for key, prepared in self._prepare_each(unknown, {}).items():
            if prepared.features is not None:
                features[key] = prepared.features
        if not self.module.encoder_is_frozen:
            return {}
        with torch.cuda.stream(self._stream) if self._stream else nullcontext():
            found = moved(found, self.device)
            found |= self._run_encoder(features, cache_keys, self.module)
        if self._stream:
            self._stream.synchronize()
        return found

    def _take_ahead(self, utterances: Sequence[Utterance]) -> None:
        """Wait for the next batch if any of these are in it; it is this batch from now on."""
        wanted = [_key(utterance) for utterance in utterances if utterance.id not in self._encoded]
        found = next((batch for batch in self._ahead if not batch[0].isdisjoint(wanted)), None)
        if found is None:
            return
        self._ahead.remove(found)
        for (name, *_), output in found[1].result().items():
            if output.is_cuda:  # made on another stream
                output.record_stream(torch.cuda.current_stream(self.device))
            # a small dataset comes round within a step: what is there was heard by this step's rollouts
            self._encoded.setdefault(name, output)


def moved(outputs: Mapping[K, Tensor], device: torch.device) -> dict[K, Tensor]:
    """Encoder outputs [O, D] on `device`, in one copy: a batch has hundreds, and each costs a round trip. They are then
    views of one memory, which pickle would send once for each.
    """
    if not outputs or next(iter(outputs.values())).device.type == device.type:
        return dict(outputs)
    rows = torch.cat(list(outputs.values())).to(device)
    return dict(zip(outputs, rows.split([len(item) for item in outputs.values()]), strict=True))


def _encoding(clips: Sequence[Features]) -> str:
    """What is encoded at a time, in words."""
    return f"encoding {len(clips)} clips at a time, the longest {max(clip.num_frames for clip in clips)} frames"


def _key(utterance: Utterance) -> Key:
    return utterance.id, utterance.where, utterance.augmentation
