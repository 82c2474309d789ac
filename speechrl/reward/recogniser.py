"""Recognisers that listen to generated speech: what they hear, and how likely they find what was to be said.

    recogniser = load_recogniser("runs/quickstart/grpo/hf/last")     # once, when the reward file loads
    recogniser.hear(sounds, references, languages) -> [Heard(text, logprob), ...]

A row of RECOGNISERS per kind; what the path holds decides. All decode greedily, so a sound is always heard alike.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx
import numpy as np
import torch

from speechrl.data.languages import language_code
from speechrl.models.load import quiet_libraries
from speechrl.rollout.engine import Completion, Sampling
from speechrl.sections import Runtime, Selection, Train
from speechrl.speech.sound import samples_of, wav_bytes, write_sound
from speechrl.training.inference import InferenceRank
from speechrl.types import AudioRef, Sound, Utterance

RATE_HZ = 16000
SPARE_TOKENS = 32  # of a transcript beyond the characters of what was to be said
SHORTEST_S = 0.1  # a shorter sound is heard as nothing: encoders need a few frames


@dataclass(frozen=True)
class Heard:
    """text: the transcript, "" of nothing. logprob: mean log-probability (nats) per token of the reference, as the
    recogniser would write it, given the sound; None where it does not tell.
    """

    text: str
    logprob: float | None = None


class Recogniser(Protocol):
    def hear(self, sounds: Sequence[Sound], references: Sequence[str], languages: Sequence[str | None]) -> list[Heard]:
        """One for each sound, in their order."""
        ...


class OwnModel:
    """A folder that this package loads, such as an export of `speechrl train` (Qwen3-ASR, Qwen2-Audio)."""

    def __init__(self, path: str, device: str):
        on_gpu = device.startswith("cuda")
        runtime = Runtime(device="cuda" if on_gpu else "cpu", threads_per_rank=torch.get_num_threads())
        self.rank = InferenceRank(path, runtime, Selection(), "fp32")

    def hear(self, sounds: Sequence[Sound], references: Sequence[str], languages: Sequence[str | None]) -> list[Heard]:
        with tempfile.TemporaryDirectory(prefix="speechrl_heard_") as folder:
            utterances = []
            rows = zip(sounds, references, languages, strict=True)
            for index, (sound, text, language) in enumerate(rows):
                path = f"{folder}/{index}.wav"
                write_sound(path, sound)
                utterances.append(Utterance(str(index), text, AudioRef(path), language=language, where=path))
            limits = [SPARE_TOKENS + len(text) for text in references]  # a loop must not take for ever
            groups = self.rank.generate(
                utterances, Sampling(temperature=0.0, batch_size=32, max_new_tokens=max(limits, default=1))
            )
            logprobs = self._logprobs(utterances)
        self.rank.forget()
        self.rank.builder.clear()
        # each cut at its own limit, whatever its neighbours were given
        texts = [
            self.rank.builder.decode(group.rollouts[0].token_ids[:limit], group.utterance)[1]
            for group, limit in zip(groups, limits, strict=True)
        ]
        return [Heard(text, value) for text, value in zip(texts, logprobs, strict=True)]

    def _logprobs(self, utterances: Sequence[Utterance]) -> list[float]:
        builder, groups = self.rank.builder, []
        for utterance in utterances:
            tagged = bool(utterance.language) and self.rank.family.prefill is not None
            ids = builder.label_ids(utterance, with_language=tagged)
            said = Completion(ids, (0.0,) * len(ids), "stop")
            groups.append(self.rank.group_of(builder.prepare(utterance).prompt, [said], 0))
        return [float(np.mean(values[0])) for values in self.rank.logprobs(groups, 1.0, Train())]


class Whisper:
    """A Whisper folder of transformers. Sounds above 30 s are cut there."""

    def __init__(self, path: str, device: str):
        from transformers import WhisperForConditionalGeneration, WhisperProcessor

        quiet_libraries()
        local = {"local_files_only": True} if Path(path).is_dir() else {}
        self.processor = WhisperProcessor.from_pretrained(path, **local)
        self.model: Any = WhisperForConditionalGeneration.from_pretrained(path, **local).to(device).eval()

    @torch.no_grad()
    def hear(self, sounds: Sequence[Sound], references: Sequence[str], languages: Sequence[str | None]) -> list[Heard]:
        heard = []
        for sound, reference, language in zip(sounds, references, languages, strict=True):
            samples = samples_of(sound, RATE_HZ)
            mel = self.processor(samples, sampling_rate=RATE_HZ, return_tensors="pt").input_features
            encoded = self.model.get_encoder()(mel.to(self.model.device, self.model.dtype))  # once for both
            many = getattr(self.model.generation_config, "is_multilingual", False)
            told = {"language": language_code(language), "task": "transcribe"} if many and language else {}
            ids = self.model.generate(
                encoder_outputs=encoded,
                num_beams=1,
                do_sample=False,
                max_new_tokens=SPARE_TOKENS + len(reference),
                **told,
            )
            text = self.processor.batch_decode(ids, skip_special_tokens=True)[0].strip()
            heard.append(Heard(text, self._logprob(encoded, reference, told)))
        return heard

    def _logprob(self, encoded: Any, reference: str, told: dict[str, str]) -> float:
        tokenizer = self.processor.tokenizer
        if told:
            tokenizer.set_prefix_tokens(**told, predict_timestamps=False)
        ids = torch.tensor([tokenizer(f" {reference}").input_ids], device=self.model.device)
        first = len(tokenizer.prefix_tokens)
        logits = self.model(encoder_outputs=encoded, decoder_input_ids=ids[:, :-1]).logits[0, first - 1 :].float()
        chosen = logits.log_softmax(-1).gather(-1, ids[0, first:, None])
        return float(chosen.mean())


class FasterWhisper:
    """A CTranslate2 Whisper folder (package faster-whisper); tells no likelihoods of a given text."""

    def __init__(self, path: str, device: str):
        try:
            from faster_whisper import WhisperModel
        except ImportError as error:
            raise ValueError(f"recogniser {path} is a CTranslate2 model: pip install faster-whisper") from error
        self.model = WhisperModel(path, device=device.split(":")[0], local_files_only=Path(path).is_dir())

    def hear(self, sounds: Sequence[Sound], references: Sequence[str], languages: Sequence[str | None]) -> list[Heard]:
        heard = []
        for sound, language in zip(sounds, languages, strict=True):
            code = language_code(language) if language and self.model.model.is_multilingual else None
            parts, _ = self.model.transcribe(
                samples_of(sound, RATE_HZ),
                language=code,
                beam_size=1,
                temperature=0.0,
                condition_on_previous_text=False,
            )
            heard.append(Heard("".join(part.text for part in parts).strip()))
        return heard


class RemoteRecogniser:
    """A server with OpenAI's /v1/audio/transcriptions, such as `vllm serve` of an export; tells no likelihoods."""

    def __init__(self, path: str, device: str):
        url, _, model = path.partition("#")
        self.url, self.model = url, model

    def hear(self, sounds: Sequence[Sound], references: Sequence[str], languages: Sequence[str | None]) -> list[Heard]:
        """Raises ValueError when the server can't be reached or answers anything else."""
        heard = []
        with httpx.Client(timeout=120.0) as client:
            for sound, language in zip(sounds, languages, strict=True):
                form = {"model": self.model, "temperature": "0"}
                form |= {"language": language_code(language)} if language else {}
                try:
                    answer = client.post(self.url, data=form, files={"file": ("speech.wav", wav_bytes(sound))})
                    answer.raise_for_status()
                    heard.append(Heard(str(answer.json()["text"]).strip()))
                except (httpx.HTTPError, ValueError, KeyError) as error:
                    raise ValueError(f"recogniser {self.url}: no transcript: {error}") from error
        return heard


RECOGNISERS: dict[str, Callable[[str, str], Recogniser]] = {
    "server": RemoteRecogniser,
    "faster_whisper": FasterWhisper,
    "whisper": Whisper,
    "own": OwnModel,
}


def kind_of(path: str) -> str:
    """The row for a folder or URL (URL#MODEL names the server's model). Raises ValueError where there is no model."""
    folder = Path(path)
    if path.startswith(("http://", "https://")):
        return "server"
    if (folder / "model.bin").exists() and any(folder.glob("vocabulary.*")):  # .txt of an older converter
        return "faster_whisper"
    try:
        model_type = json.loads((folder / "config.json").read_text()).get("model_type")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"recogniser {path}: no model there ({error}); give a Whisper folder, an export of speechrl, a CTranslate2 "
            "folder or a server's URL"
        ) from error
    return "whisper" if model_type == "whisper" else "own"


def load_recogniser(path: str, device: str = "cpu") -> Recogniser:
    """Raises ValueError when there is none at `path`, or its package is missing."""
    return RECOGNISERS[kind_of(path)](path, device)


def hear_all(
    recogniser: Recogniser,
    sounds: Sequence[Sound | None],
    references: Sequence[str],
    languages: Sequence[str | None],
) -> list[Heard]:
    """Of no sound, or one too short to hold a word, nothing is heard, with a log-probability of -inf."""
    places = [index for index, sound in enumerate(sounds) if sound is not None and sound.duration_s >= SHORTEST_S]
    found = recogniser.hear(
        [sounds[index] for index in places],  # type: ignore[misc]
        [references[index] for index in places],
        [languages[index] for index in places],
    )
    heard = [Heard("", float("-inf"))] * len(sounds)
    for index, item in zip(places, found, strict=True):
        heard[index] = item
    return heard
