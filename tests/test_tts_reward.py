"""rewards/tts.py ranks clips as an ear would: a clean one above the same one with something wrong."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from speechrl.data.synth import Espeak, add_noise
from speechrl.reward import recogniser
from speechrl.reward.plugin import RewardPlugin, RewardRequest
from speechrl.reward.recogniser import Heard
from speechrl.speech.sound import samples_of, to_sound, write_sound
from speechrl.speech.vq import log_mel
from speechrl.types import Sound

RATE = 16000
TEXTS = ("open the kitchen window", "turn off the bedroom radio", "check the garage door")
WOMAN, MAN = "en-us+f2", "en-us+m3"


def spoken(text: str, voice: str = WOMAN) -> np.ndarray:
    return Espeak().synthesise(text, voice, 170, 50)


def frames(samples: np.ndarray) -> np.ndarray:
    """[T, M] log-mel frames of 40 ms at a fixed level."""
    mel_FM = log_mel(samples_of(to_sound(samples, RATE, -23.0)))
    return mel_FM[: len(mel_FM) // 4 * 4].reshape(-1, 4, mel_FM.shape[1]).mean(1)


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """Mean distance of two clips' frames along the best warping path (Sakoe and Chiba 1978)."""
    cost = np.abs(a[:, None] - b[None]).mean(2)
    best = np.full((len(a) + 1, len(b) + 1), np.inf)
    best[0, 0] = 0.0
    for row in range(1, len(a) + 1):
        for column in range(1, len(b) + 1):
            before = min(best[row - 1, column], best[row, column - 1], best[row - 1, column - 1])
            best[row, column] = cost[row - 1, column - 1] + before
    return float(best[-1, -1] / (len(a) + len(b)))


class Templates:
    """A recogniser that knows three sentences in two voices, and nothing else."""

    def __init__(self) -> None:
        self.known = {text: [frames(spoken(text, voice)) for voice in (WOMAN, MAN)] for text in TEXTS}

    def hear(self, sounds: Sequence[Sound], references: Sequence[str], languages: Sequence[str | None]) -> list[Heard]:
        heard = []
        for sound, reference in zip(sounds, references, strict=True):
            clip = frames(samples_of(sound))
            far = {text: min(distance(clip, known) for known in voices) for text, voices in self.known.items()}
            heard.append(Heard(min(far, key=far.__getitem__), -far[reference]))
        return heard


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory):
    """{fault: the answer for each text}."""
    folder = tmp_path_factory.mktemp("voice")
    write_sound(folder / "v.wav", to_sound(spoken("check one two"), RATE))
    stream = np.random.default_rng(0)
    faults = {
        "none": lambda text, clip: clip,
        "noise": lambda text, clip: add_noise(clip, 5.0, "white", stream),
        "wrong text": lambda text, clip: spoken(TEXTS[(TEXTS.index(text) + 1) % 3]),
        "other voice": lambda text, clip: spoken(text, MAN),
        "cut short": lambda text, clip: clip[: len(clip) * 6 // 10],
        "looped": lambda text, clip: np.tile(clip, 3),
        "clipped": lambda text, clip: np.clip(clip / np.abs(clip).max() * 8, -1, 1),
        "flat and quiet": lambda text, clip: np.concatenate([clip, np.zeros(3 * len(clip))]),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recogniser, "load_recogniser", lambda path, device: Templates())
        patch.setenv("SPEECHRL_TTS_ASR", "templates")
        plugin = RewardPlugin.load("rewards/tts.py")
        found = {}
        for name, fault in faults.items():
            sounds = [to_sound(np.asarray(fault(text, spoken(text))), RATE, -23.0) for text in TEXTS]
            found[name] = plugin.score(request([*sounds, None], str(folder / "v.wav")))
    return found


def request(sounds: list[Sound | None], voice: str) -> RewardRequest:
    count = len(sounds)
    seconds = [len(spoken(text)) / RATE for text in TEXTS]
    texts = [*TEXTS, TEXTS[0]]
    return RewardRequest(
        ids=list(map(str, range(count))), queries=texts, prompts=texts, labels=texts, responses=[""] * count,
        metadata=[{}] * count, languages=["English"] * count, keywords=[[]] * count, audio_paths=[None] * count,
        durations_s=[*seconds, seconds[0]], finish_reasons=["stop"] * count, raw_responses=[""] * count,
        generated_audio=sounds, speaker_paths=[voice] * count,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fault", "part"),
    [
        ("noise", "likelihood"),
        ("noise", "speaker"),
        ("wrong text", "words"),
        ("other voice", "speaker"),
        ("cut short", "duration"),
        ("looped", "duration"),
        ("looped", "signal"),
        ("clipped", "signal"),
        ("flat and quiet", "signal"),
    ],
)
def test_a_clean_clip_beats_the_same_one_with_a_fault(answers, fault: str, part: str):
    clean, worse = answers["none"], answers[fault]
    assert clean.heard[:3] == list(TEXTS)
    for index in range(3):
        assert clean.rewards[index] > worse.rewards[index] + 0.01, (fault, index)
        assert clean.parts[part][index] > worse.parts[part][index] + 0.02, (fault, index)


def test_no_speech_is_the_worst(answers):
    for answer in answers.values():
        assert answer.rewards[3] == 0.0 < min(answer.rewards[:3])


def test_duration_is_a_ratio(answers):
    assert answers["none"].parts["duration"][:3] == [1.0] * 3
    assert answers["cut short"].parts["duration"][:3] == pytest.approx([0.6] * 3, abs=0.001)
    assert answers["looped"].parts["duration"][:3] == pytest.approx([1 / 3] * 3, abs=0.001)
