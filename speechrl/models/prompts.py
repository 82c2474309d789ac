"""Utterance -> token ids and encoder features, with the model's own processor; token ids -> text.

An utterance is decoded and turned into features once; a bounded cache keeps the result for later epochs. One whose
encoder output is at hand is not decoded at all: its prompt needs the number of audio tokens alone.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, replace

from speechrl.data.audio import load_audio
from speechrl.data.augment import augment, mask_features
from speechrl.models.family import Features, feature_extractor, language_name
from speechrl.models.load import LoadedModel
from speechrl.types import Codes, Prompt, Rollout, Utterance

MIN_AUDIO_S = 0.025  # one analysis window


@dataclass(frozen=True)
class Prepared:
    """A prompt and the encoder's input for its audio (None for text, and where the encoder's output is at hand)."""

    prompt: Prompt
    features: Features | None


class PromptBuilder:
    """Builds prompts and labels for one model. Several threads may use it: a tokenizer by itself serves one at a time.

    instruction: text beside the audio where an utterance has no prompt of its own; or else the processor's.
    force_language: start the answer with the utterance's language tag.
    cache_bytes: bound on the prompts and features kept in memory. keep_features: False keeps prompts alone.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        instruction: str = "",
        force_language: bool = False,
        cache_bytes: int = 1 << 30,
        keep_features: bool = True,
    ):
        self.family, self.processor, self.tokenizer = loaded.family, loaded.processor, loaded.tokenizer
        own = getattr(self.processor, "default_transcription_prompt", None)
        self.instruction = instruction or own or self.family.default_instruction
        if force_language and not self.family.takes_language:
            raise ValueError(f"--data.force_language: family {self.family.name} has no language tag")
        self.force_language = force_language
        self.stop_ids = _stop_ids(loaded)
        self.pad_id = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else self.stop_ids[0]
        self.audio_id: int | None = None
        self.max_audio_s = float("inf")
        if self.family.hearing is not None:
            self.audio_id = self.tokenizer.convert_tokens_to_ids(self.processor.audio_token)
            self.max_audio_s = self.family.hearing.max_s(self.processor)
            self.extractor = feature_extractor(self.processor)
        self.banned_ids = _banned_ids(loaded, self.stop_ids)
        self.allowed_ids: tuple[int, ...] = ()  # all but the banned ones if empty
        self._cache: OrderedDict[tuple, Prepared] = OrderedDict()
        self._cache_bytes, self._cached_bytes = cache_bytes, 0
        self._keep_features = keep_features
        self.num_decoded = 0
        self._lock = threading.Lock()

    def prepare(self, utterance: Utterance, num_outputs: int | None = None) -> Prepared:
        """num_outputs: length of the encoder's output where it is at hand; then no audio is opened.

        Raises ValueError naming the utterance when its audio is missing, unreadable or does not fit the model.
        """
        key = (utterance.id, utterance.where, utterance.augmentation)
        with self._lock:
            kept = self._cache.get(key)
            if kept is not None and self._serves(kept, num_outputs):
                self._cache.move_to_end(key)
                return kept
        with_audio = self.family.has_audio
        prepared = self._audio_prompt(utterance, num_outputs) if with_audio else self._text_prompt(utterance)
        with self._lock:
            self._remember(key, prepared if self._keep_features else replace(prepared, features=None))
        return prepared

    def _serves(self, kept: Prepared, num_outputs: int | None) -> bool:
        if num_outputs is None:
            return kept.features is not None or not self.family.has_audio
        return kept.prompt.num_audio_tokens == self._num_rows(num_outputs)

    def _num_rows(self, num_outputs: int) -> int:
        assert self.family.hearing is not None
        return self.family.hearing.num_rows(num_outputs, self.extractor)

    def label_ids(self, utterance: Utterance, with_language: bool) -> tuple[int, ...]:
        """What SFT trains the model to answer, the stop token included."""
        answer = self.family.answer(utterance, with_language and not self.force_language)
        with self._lock:
            return (*self.tokenizer(answer, add_special_tokens=False).input_ids, self.stop_ids[0])

    def check_fit(self, utterance: Utterance) -> None:
        """Raises ValueError naming the utterance when it is no input for this model. Nothing is opened."""
        family = self.family
        if utterance.audio is not None and not family.has_audio:
            raise ValueError(
                f"{utterance.where}: utterance {utterance.id} has audio, but the model ({family.name}) has no audio "
                "encoder; for a model that speaks give --data.speech_style"
            )
        if utterance.audio is None and family.has_audio:
            raise ValueError(f"{utterance.where}: utterance {utterance.id} has no `audio`, which {family.name} needs")
        if utterance.duration_s is not None and utterance.duration_s > self.max_audio_s:
            raise ValueError(
                f"{utterance.where}: utterance {utterance.id} lasts {utterance.duration_s:.1f} s, {family.name} hears "
                f"{self.max_audio_s:g} s: set --data.max_duration_s {self.max_audio_s:g} --data.on_error skip"
            )

    def reference(self, utterance: Utterance) -> Rollout:
        """The reference as if the model had written it."""
        ids = self.label_ids(utterance, with_language=bool(utterance.language))
        return Rollout(ids, (0.0,) * len(ids), "stop", 0, *self.decode(ids[:-1], utterance))

    def codes_of(self, token_ids: tuple[int, ...]) -> Codes | None:
        """Speech codes of a completion; None for a model that writes text."""
        return None

    def decode(self, token_ids: tuple[int, ...], utterance: Utterance) -> tuple[str, str, str | None]:
        """(text with its tags, transcript, language the model named)."""
        with self._lock:
            raw = self.tokenizer.decode(list(token_ids), skip_special_tokens=True)
        language, text = self.family.parse(raw)
        if self.force_language:
            language = language_name(utterance.language)
        return raw, text, language

    def _audio_prompt(self, utterance: Utterance, num_outputs: int | None) -> Prepared:
        with self._lock:  # tokenizers take one caller at a time
            text, ids = self._text_and_ids(utterance)
        features = None
        if num_outputs is None:
            features = self._features(utterance)  # the slow part, side by side in the threads of --data.num_workers
            assert self.family.hearing is not None
            num_outputs = self.family.hearing.num_outputs(features.num_frames)
        num_rows = self._num_rows(num_outputs)
        if num_rows < 1:
            raise ValueError(f"{utterance.where}: {utterance.audio} is too short: {self.family.name} hears nothing")
        mark = self.audio_id
        assert mark is not None
        ids[ids.index(mark) : len(ids) - ids[::-1].index(mark)] = [mark] * num_rows
        return Prepared(Prompt(utterance, tuple(ids), text, num_rows), features)

    def _text_and_ids(self, utterance: Utterance) -> tuple[str, list[int]]:
        """The prompt as text, and its token ids with one run of placeholders, of any length."""
        if self.family.prompt_ids is not None:
            ids = self.family.prompt_ids(self.processor, utterance, self.instruction, self._forced(utterance))
            return self.tokenizer.decode(ids, skip_special_tokens=False), ids
        text, mark = self._chat_text(utterance), self.processor.audio_token
        if text.count(mark) != 1:
            raise ValueError(
                f"{utterance.where}: the prompt of {utterance.id} (its `prompt`, or --data.instruction) contains "
                f"{mark}, which stands for audio; take it out"
            )
        start = self.tokenizer.bos_token
        templated = start is not None and text.startswith(start)
        return text, list(self.tokenizer(text, add_special_tokens=not templated).input_ids)

    def _features(self, utterance: Utterance) -> Features:
        """The encoder's input."""
        assert self.family.hearing is not None
        if utterance.audio is None:
            raise ValueError(
                f"{utterance.where}: utterance {utterance.id} has no audio, which {self.family.name} needs"
            )
        rate_hz = self.extractor.sampling_rate
        samples = load_audio(utterance.audio, rate_hz, utterance.where)
        change = utterance.augmentation
        if change is not None:
            samples = augment(samples, rate_hz, change)
        if len(samples) > self.max_audio_s * rate_hz:
            raise ValueError(
                f"{utterance.where}: {utterance.audio} lasts {len(samples) / rate_hz:.1f} s, {self.family.name} hears "
                f"{self.max_audio_s:g} s; cut it, or lower --data.max_duration_s and --data.on_error skip"
            )
        if len(samples) < MIN_AUDIO_S * rate_hz:
            raise ValueError(f"{utterance.where}: {utterance.audio} is shorter than {MIN_AUDIO_S} s")
        with self._lock:
            self.num_decoded += 1
        features = self.family.hearing.features(self.extractor, samples)
        if change is None:
            return features
        return replace(features, mel_MF=mask_features(features.mel_MF, features.num_frames, change))

    def _text_prompt(self, utterance: Utterance) -> Prepared:
        if utterance.audio is not None or utterance.prompt is None:
            what = "audio, but the model has no audio encoder" if utterance.audio else "no `prompt`"
            raise ValueError(f"{utterance.where}: utterance {utterance.id} has {what}")
        with self._lock:
            text = self._chat_text(utterance) if self.tokenizer.chat_template else utterance.prompt
            token_ids = tuple(self.tokenizer(text, add_special_tokens=False).input_ids)
        if not token_ids:
            raise ValueError(f"{utterance.where}: the prompt of {utterance.id} is empty")
        return Prepared(Prompt(utterance, token_ids, text), None)

    def _chat_text(self, utterance: Utterance) -> str:
        language = self._forced(utterance)
        assert self.family.messages is not None
        messages = self.family.messages(utterance, self.instruction, language)
        text = self.processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return text + self.family.prefill(language) if language and self.family.prefill else text

    def _forced(self, utterance: Utterance) -> str | None:
        """The language that the model is told; None if it shall find out."""
        if not self.force_language:
            return None
        language = language_name(utterance.language)
        if not language:
            raise ValueError(f"{utterance.where}: --data.force_language, but {utterance.id} has no `language`")
        return language

    def clear(self) -> None:
        """Drop the prompts and features kept in memory: an id is unique within one set only."""
        with self._lock:
            self._cache.clear()
            self._cached_bytes = 0

    def _remember(self, key: tuple, prepared: Prepared) -> None:
        if key in self._cache:
            self._cached_bytes -= _num_bytes(self._cache.pop(key))
        self._cache[key] = prepared
        self._cached_bytes += _num_bytes(prepared)
        while self._cached_bytes > self._cache_bytes and len(self._cache) > 1:
            _, dropped = self._cache.popitem(last=False)
            self._cached_bytes -= _num_bytes(dropped)


def _num_bytes(prepared: Prepared) -> int:
    """Of the features, and of a prompt's tuple of ids (8 bytes each)."""
    features = prepared.features.mel_MF.nbytes if prepared.features else 0
    return features + 8 * len(prepared.prompt.token_ids)


def _stop_ids(loaded: LoadedModel) -> tuple[int, ...]:
    """Ids that end a completion; the tokenizer's own end first, which is what SFT trains."""
    config = loaded.model.generation_config if loaded.model is not None else None
    ends = config.eos_token_id if config is not None else None
    ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    first = loaded.tokenizer.eos_token_id
    if first is None and not ends:
        raise ValueError(f"{loaded.path}: neither tokenizer nor generation config names an end-of-sequence token")
    return tuple(dict.fromkeys([*([] if first is None else [first]), *ends]))


def _banned_ids(loaded: LoadedModel, stop_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Ids that a completion must not hold: media placeholders and other specials, and rows behind the vocabulary.

    Sampler and trainer leave them out alike, so recorded and recomputed log-probs are of one distribution.
    """
    tokenizer = loaded.tokenizer
    allowed = set(stop_ids) | set(tokenizer.convert_tokens_to_ids(list(loaded.family.output_tokens)))
    banned = set(tokenizer.all_special_ids) - allowed
    if loaded.family.has_audio:
        names = ("audio_token", "audio_bos_token", "audio_eos_token")
        marks = [mark for name in names if isinstance(mark := getattr(loaded.processor, name, None), str)]
        banned |= set(tokenizer.convert_tokens_to_ids(marks))
    if loaded.model is None:
        return tuple(sorted(banned))
    rows = loaded.model.get_output_embeddings().weight.shape[0]
    # a placeholder may lie behind the rows: Granite Speech puts audio in its place before it looks it up
    return tuple(sorted({token_id for token_id in banned if token_id < rows} | set(range(len(tokenizer), rows))))
