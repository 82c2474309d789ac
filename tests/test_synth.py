"""Synthetic speech: the same bytes in every process, disjoint splits, the SNR that the manifest says."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from speechrl.data.audio import duration_s_of, load_audio
from speechrl.data.manifest import read_manifest
from speechrl.data.synth import (
    DEFAULT_SIZES,
    LANGUAGES,
    NOISES,
    RATE_HZ,
    SPLITS,
    Espeak,
    add_noise,
    plan_phrases,
    speech_vocabulary,
    synthesise_corpus,
)
from speechrl.types import Utterance

SIZES = dict.fromkeys(SPLITS, 12)
SCRIPT = """
import sys
from speechrl.data.synth import SPLITS, synthesise_corpus
if __name__ == "__main__":
    synthesise_corpus(sys.argv[1], seed=3, sizes=dict.fromkeys(SPLITS, 12), workers=int(sys.argv[2]))
"""


def synthesise_elsewhere(folder: Path, workers: int) -> dict[str, str]:
    """Hash of every file of a corpus made in a fresh process."""
    script = folder / "make.py"
    script.parent.mkdir(parents=True)
    script.write_text(SCRIPT)
    root = str(Path(__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": root}
    subprocess.run(
        [sys.executable, str(script), str(folder / "corpus"), str(workers)], check=True, env=environment, timeout=300
    )
    files = sorted(path for path in (folder / "corpus").rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder / "corpus")): hashlib.sha256(path.read_bytes()).hexdigest() for path in files
    }  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthesise_corpus(tmp_path_factory.mktemp("synth") / "corpus", seed=3, sizes=SIZES)


@pytest.fixture(scope="module")
def utterances(corpus: Path) -> dict[str, list[Utterance]]:
    return {name: read_manifest(corpus / f"{name}.jsonl") for name in SPLITS}


def test_the_same_bytes_in_two_fresh_processes_and_with_workers(tmp_path: Path) -> None:
    one = synthesise_elsewhere(tmp_path / "one", workers=1)
    assert len(one) == 8 * 12 + 8 + 1  # clips, manifests, corpus.json
    assert synthesise_elsewhere(tmp_path / "two", workers=2) == one


def test_a_clip_does_not_depend_on_the_clips_before_it() -> None:
    """Without a fresh library, espeak-ng gives another length each time (flutter) or other noise (whisper, f3)."""
    speaker = Espeak()
    for voice, text in (("en-us+m1", "turn on the light"), ("cmn+f3", "打开电灯"), ("en+whisper", "one two")):
        first = speaker.synthesise(text, voice, 170, 50)
        speaker.synthesise("something else", "en-us+Annie", 200, 40)
        np.testing.assert_array_equal(speaker.synthesise(text, voice, 170, 50), first)
        assert 0.3 * RATE_HZ < len(first) < 2 * RATE_HZ and 0.05 < np.abs(first).max() <= 1.0


def test_speed_and_pitch_are_heard() -> None:
    speaker = Espeak()
    slow, fast = (len(speaker.synthesise("one two three four", "en-us", wpm, 50)) for wpm in (120, 240))
    assert 1.6 < slow / fast < 2.4
    low, high = (speaker.synthesise("one two three four", "en-us", 170, pitch) for pitch in (20, 80))
    assert strongest_period(low) > 1.3 * strongest_period(high)


def strongest_period(samples: np.ndarray) -> int:
    """Lag in samples of the autocorrelation's peak between 70 and 400 Hz."""
    spectrum = np.abs(np.fft.rfft(samples, 2 * len(samples))) ** 2
    shortest, longest = RATE_HZ // 400, RATE_HZ // 70
    return shortest + int(np.argmax(np.fft.irfft(spectrum)[shortest:longest]))


def test_the_manifest_says_what_the_audio_is(utterances: dict[str, list[Utterance]]) -> None:
    for name, rows in utterances.items():
        assert [row.id for row in rows] == [f"{name}-{index:05d}" for index in range(12)]
        assert Counter(row.language for row in rows) == {"English": 6, "Chinese": 6}
        for row in rows:
            assert row.audio is not None and duration_s_of(row.audio) == row.duration_s
            assert 0.5 <= duration_s_of(row.audio) <= 3.0
            assert 0.29 < np.abs(load_audio(row.audio)).max() < 0.91
            assert all(word in row.text for word in row.keywords)
            low, high = SPLITS[name].snr_db
            assert low <= row.metadata["snr_db"] <= high
            assert SPLITS[name].speed_wpm[0] <= row.metadata["speed_wpm"] <= SPLITS[name].speed_wpm[1]
            assert row.metadata["noise"] in NOISES


def test_the_snr_is_what_the_manifest_says(utterances: dict[str, list[Utterance]]) -> None:
    """The clean speech is made again from the manifest alone; what is left of the clip is noise."""
    speaker = Espeak()
    for row in utterances["test_noisy"]:
        assert row.audio is not None
        voice, speed_wpm, pitch = (row.metadata[key] for key in ("voice", "speed_wpm", "pitch"))
        speech, mixed = speaker.synthesise(row.text, voice, speed_wpm, pitch), load_audio(row.audio)
        gain = np.dot(mixed, speech) / np.dot(speech, speech)
        noise = mixed - gain * speech
        measured_db = 10 * np.log10(np.mean((gain * speech) ** 2) / np.mean(noise**2))
        assert measured_db == pytest.approx(row.metadata["snr_db"], abs=0.5)


@pytest.mark.parametrize(("kind", "low", "high"), [("white", 0.11, 0.14), ("pink", 0.6, 0.9), ("speech", 0.85, 1.0)])
def test_noise_has_its_power_and_its_colour(kind: str, low: float, high: float) -> None:
    """Share of the noise's power below 1 kHz of 8 kHz: an eighth for white noise."""
    speech = np.sin(np.arange(40000) / 10).astype(np.float32)
    noise = add_noise(speech, 10.0, kind, np.random.default_rng(0)) - speech
    assert 10 * np.log10(np.mean(speech**2) / np.mean(noise**2)) == pytest.approx(10.0, abs=1e-3)
    power = np.abs(np.fft.rfft(noise)) ** 2
    assert low < power[: len(power) // 8].sum() / power.sum() < high


def test_splits_share_no_text_and_evaluation_no_voice(utterances: dict[str, list[Utterance]]) -> None:
    texts = [{row.text for row in rows} for rows in utterances.values()]
    assert len(set.union(*texts)) == sum(len(part) for part in texts)
    groups = (("sft_train", "rl_train_clean"), ("rl_train_noisy",), ("sft_dev", "dev_noisy", "dev_clean"))
    groups = (*groups, ("test_noisy", "test_clean"))
    variants = [{variant for name in group for variant in SPLITS[name].voices} for group in groups]
    assert len(set.union(*variants)) == sum(len(part) for part in variants) == 34
    for name, rows in utterances.items():
        assert {row.metadata["voice"].partition("+")[2] for row in rows} <= set(SPLITS[name].voices)


def test_default_sizes_have_enough_phrases() -> None:
    plan = plan_phrases(DEFAULT_SIZES, seed=0)
    assert {name: len(rows) for name, rows in plan.items()} == DEFAULT_SIZES
    texts = {name: {phrase.text for _, phrase in rows} for name, rows in plan.items()}
    assert len(set.union(*texts.values())) == sum(len(part) for part in texts.values())
    for name, split in SPLITS.items():
        if split.held_out:
            assert len(texts[name]) > 0.8 * DEFAULT_SIZES[name]  # a few commands stand twice, in other voices
        repeats = Counter(phrase.text for _, phrase in plan[name]).most_common(1)[0][1]
        assert repeats <= 15  # there are 270 commands a language, training has over 1000
    characters = set("".join(phrase.text for rows in plan.values() for _, phrase in rows))
    assert characters <= set(speech_vocabulary())
    assert plan_phrases(DEFAULT_SIZES, seed=1) != plan


def test_phrases_and_their_keywords() -> None:
    plan = plan_phrases(DEFAULT_SIZES, seed=0)
    found = {phrase.text: phrase.keywords for rows in plan.values() for _, phrase in rows}
    assert found["turn on the kitchen light"] == ("turn on", "kitchen", "light")
    assert found["打开厨房电灯"] == ("打开", "厨房", "电灯")
    with_digits = [words for text, words in found.items() if set(text.split()) <= set(LANGUAGES["English"].digits)]
    assert len(with_digits) > 800 and set(with_digits) == {()}


def test_vocabulary() -> None:
    assert set(speech_vocabulary(["English"])) == set("abcdefghiklmnoprstuvwxyz ")
    assert set("零一二三四五六七八九十打开厨房电灯定时分钟温度调到") <= set(speech_vocabulary(["Chinese"]))
    assert list(speech_vocabulary()) == sorted(set(speech_vocabulary()))
    with pytest.raises(ValueError, match=r"language 'French'; it must be one of \['Chinese', 'English'\]"):
        speech_vocabulary(["French"])


def test_a_complete_corpus_is_left_and_another_refused(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in corpus.rglob("*")}
    assert synthesise_corpus(corpus, seed=3, sizes=SIZES) == corpus
    assert "complete already" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in corpus.rglob("*")} == before
    with pytest.raises(ValueError, match=r"--out .*corpus holds another corpus.*choose another folder"):
        synthesise_corpus(corpus, seed=4, sizes=SIZES)
    assert json.loads((corpus / "corpus.json").read_text())["seed"] == 3


def test_an_interrupted_corpus_is_made_again(tmp_path: Path) -> None:
    sizes = dict.fromkeys(SPLITS, 2)
    synthesise_corpus(tmp_path, seed=1, sizes=sizes)
    clip = tmp_path / "audio" / "dev_clean" / "00001.flac"
    wanted = clip.read_bytes()
    (tmp_path / "corpus.json").unlink()
    clip.write_bytes(wanted[:100])
    synthesise_corpus(tmp_path, seed=1, sizes=sizes)
    assert clip.read_bytes() == wanted and (tmp_path / "corpus.json").exists()


def test_wrong_values_are_named(tmp_path: Path) -> None:
    speaker = Espeak()
    for voice, speed_wpm, pitch, message in (
        ("xx", 170, 50, "voice 'xx': espeak-ng has no such language"),
        ("en-us+nobody", 170, 50, "no variant 'nobody'"),
        ("en-us", 20, 50, "speed 20 wpm"),
        ("en-us", 170, 101, "pitch 101"),
    ):
        with pytest.raises(ValueError, match=message):
            speaker.synthesise("one", voice, speed_wpm, pitch)
    with pytest.raises(ValueError, match="espeak-ng gives no sound for ''"):
        speaker.synthesise("", "en-us", 170, 50)
    with pytest.raises(ValueError, match="noise 'brown'"):
        add_noise(np.ones(9, np.float32), 10.0, "brown", np.random.default_rng(0))
    with pytest.raises(ValueError, match=r"unknown splits \['train'\]"):
        synthesise_corpus(tmp_path, sizes={"train": 5})
    with pytest.raises(ValueError, match="--seed is -1"):
        synthesise_corpus(tmp_path, seed=-1)
    with pytest.raises(ValueError, match=r"too few different \w+ phrases .*--scale"):
        plan_phrases({**DEFAULT_SIZES, "test_clean": 60000, "dev_clean": 20}, seed=0)
