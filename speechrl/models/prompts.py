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
from speechrl.models.families import Features, language_name
from speechrl.models.load import LoadedModel
from speechrl.types import Prompt, Utterance


@dataclass(frozen=True)
class Prepared:
    """A prompt and the encoder's input for its audio (None for text, and where the encoder's output is at hand)."""

    prompt: Prompt
    features: Features | None


class PromptBuilder:
    """Builds prompts and labels for one model. Several threads may use it: a tokenizer by itself serves one at a time.

    instruction: text beside the audio where an utterance has no prompt of its own; the family's default if empty.
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
        self.instruction = instruction or self.family.default_instruction
        if force_language and self.family.prefill is None:
            raise ValueError(f"--data.force_language: family {self.family.name} has no language tag")
        self.force_language = force_language
        self.stop_ids = _stop_ids(loaded)
        self.pad_id = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else self.stop_ids[0]
        self.audio_id = self.processor.audio_token_id if self.family.has_audio else None
        self.banned_ids = _banned_ids(loaded, self.stop_ids)
        self._cache: OrderedDict[tuple, Prepared] = OrderedDict()
        self._cache_bytes, self._cached_bytes = cache_bytes, 0
        self._keep_features = keep_features
        self.num_decoded = 0
        self._lock = threading.Lock()

    def prepare(self, utterance: Utterance, num_audio_tokens: int | None = None) -> Prepared:
        """num_audio_tokens: of the encoder's output where it is at hand; then no audio is opened.

        Raises ValueError naming the utterance when its audio is missing, unreadable or does not fit the model.
        """
        key = (utterance.id, utterance.where, utterance.augmentation)
        with self._lock:
            kept = self._cache.get(key)
            if kept is not None and self._serves(kept, num_audio_tokens):
                self._cache.move_to_end(key)
                return kept
            if self.family.has_audio:
                prepared = self._audio_prompt(utterance, num_audio_tokens)
            else:
                prepared = self._text_prompt(utterance)
            self._remember(key, prepared if self._keep_features else replace(prepared, features=None))
        return prepared

    def _serves(self, kept: Prepared, num_audio_tokens: int | None) -> bool:
        if num_audio_tokens is None:
            return kept.features is not None or not self.family.has_audio
        return kept.prompt.num_audio_tokens == num_audio_tokens

    def label_ids(self, utterance: Utterance, with_language: bool) -> tuple[int, ...]:
        """What SFT trains the model to answer, the stop token included."""
        answer = self.family.answer(utterance, with_language and not self.force_language)
        with self._lock:
            return (*self.tokenizer(answer, add_special_tokens=False).input_ids, self.stop_ids[0])

    def decode(self, token_ids: tuple[int, ...], utterance: Utterance) -> tuple[str, str, str | None]:
        """(text with its tags, transcript, language the model named)."""
        with self._lock:
            raw = self.tokenizer.decode(list(token_ids), skip_special_tokens=True)
        language, text = self.family.parse(raw)
        if self.force_language:
            language = language_name(utterance.language)
        return raw, text, language

    def _audio_prompt(self, utterance: Utterance, num_audio_tokens: int | None) -> Prepared:
        text = self._chat_text(utterance)
        mark = self.processor.audio_token
        if text.count(mark) != 1:
            raise ValueError(
                f"{utterance.where}: the prompt of {utterance.id} (its `prompt`, or --data.instruction) contains "
                f"{mark}, which stands for audio; take it out"
            )
        features = None
        if num_audio_tokens is None:
            features, ids = self._features(utterance, text)
            assert self.family.num_audio_tokens is not None
            num_audio_tokens = self.family.num_audio_tokens(features.num_frames)
        else:
            ids = self.tokenizer(text.replace(mark, mark * num_audio_tokens)).input_ids
        found = sum(token_id == self.audio_id for token_id in ids)
        if found != num_audio_tokens:
            raise ValueError(
                f"{utterance.where}: the prompt of {utterance.id} holds {found} audio tokens for {num_audio_tokens} "
                f"encoder outputs; a text that contains {mark} can't be a prompt"
            )
        return Prepared(Prompt(utterance, tuple(ids), text, found), features)

    def _features(self, utterance: Utterance, text: str) -> tuple[Features, list[int]]:
        """The encoder's input, and the prompt's token ids with as many placeholders as it will give outputs."""
        if utterance.audio is None:
            raise ValueError(
                f"{utterance.where}: utterance {utterance.id} has no audio, which {self.family.name} needs"
            )
        rate_hz = self.processor.feature_extractor.sampling_rate
        samples = load_audio(utterance.audio, rate_hz, utterance.where)
        change = utterance.augmentation
        if change is not None:
            samples = augment(samples, rate_hz, change)
        if len(samples) > self.family.max_audio_s * rate_hz:
            raise ValueError(
                f"{utterance.where}: {utterance.audio} lasts {len(samples) / rate_hz:.1f} s, {self.family.name} hears "
                f"{self.family.max_audio_s:.0f} s; cut it, or lower --data.max_duration_s and --data.on_error skip"
            )
        self.num_decoded += 1
        inputs = self.processor(text=[text], audio=[samples], sampling_rate=rate_hz, return_tensors="pt")
        mask = inputs["input_features_mask" if "input_features_mask" in inputs else "feature_attention_mask"]
        features = Features(mel_MF=inputs["input_features"][0], num_frames=int(mask.sum()))
        if change is not None:
            features = replace(features, mel_MF=mask_features(features.mel_MF, features.num_frames, change))
        return features, inputs["input_ids"][0].tolist()

    def _text_prompt(self, utterance: Utterance) -> Prepared:
        if utterance.audio is not None or utterance.prompt is None:
            what = "audio, but the model has no audio encoder" if utterance.audio else "no `prompt`"
            raise ValueError(f"{utterance.where}: utterance {utterance.id} has {what}")
        text = self._chat_text(utterance) if self.tokenizer.chat_template else utterance.prompt
        token_ids = tuple(self.tokenizer(text, add_special_tokens=False).input_ids)
        if not token_ids:
            raise ValueError(f"{utterance.where}: the prompt of {utterance.id} is empty")
        return Prepared(Prompt(utterance, token_ids, text), None)

    def _chat_text(self, utterance: Utterance) -> str:
        messages = self.family.messages(utterance, self.instruction)
        text = self.processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        if not self.force_language:
            return text
        language = language_name(utterance.language)
        if not language:
            raise ValueError(f"{utterance.where}: --data.force_language, but {utterance.id} has no `language`")
        assert self.family.prefill is not None
        return text + self.family.prefill(language)

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
        banned |= {
            token_id
            for name in ("audio_token_id", "audio_bos_token_id", "audio_eos_token_id")
            if (token_id := getattr(loaded.processor, name, None)) is not None
        }
    rows = loaded.model.get_output_embeddings().weight.shape[0] if loaded.model is not None else 0
    return tuple(sorted(banned | set(range(len(tokenizer), rows))))
