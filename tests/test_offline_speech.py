"""Recorded speech out of packages: small fake packages as the real ones are laid out, and what becomes of them."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile

from speechrl.data.audio import duration_s_of
from speechrl.data.manifest import read_manifest
from speechrl.data.normalise import normalise
from speechrl.types import AudioRef

ROOT = Path(__file__).parent.parent
SPLITS = ("sft_train", "rl_train", "dev", "test")


def sound(path: Path, seconds: float, rate_hz: int = 8000, peak: float = 0.3) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    wave = peak * np.sin(np.arange(int(seconds * rate_hz)) * 0.3)
    soundfile.write(path, wave, rate_hz, format="OGG" if path.suffix == ".ogg" else "WAV")


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of unpacked packages, as data/packages.py leaves them."""
    cache = tmp_path_factory.mktemp("packages")
    sounds = cache / "asterisk-core-sounds-en-wav.unpacked/usr/share/asterisk/sounds/en_US_f_Allison"
    lines = [
        "; a comment",
        "beep: [a tone]",
        "silent: Nobody speaks.",
        "gone: No sound file.",
        "short: Hm.",
        "digits/1: 1",
    ]
    for index in range(60):
        lines.append(f"vm-{index}: Message number {chr(97 + index % 26)}{index} is here.")
        sound(sounds / f"vm-{index}.wav", 2.0)
    lines.append("twin: message NUMBER a0, is here!")  # says what vm-0 says
    sound(sounds / "twin.wav", 1.5)
    sound(sounds / "beep.wav", 1.0)
    sound(sounds / "silent.wav", 1.0, peak=0.001)
    sound(sounds / "short.wav", 0.2)
    sound(sounds / "digits/1.wav", 1.0)
    texts = cache / "asterisk-core-sounds-en.unpacked/usr/share/doc/asterisk-core-sounds-en/core-sounds-en.txt.gz"
    texts.parent.mkdir(parents=True)
    texts.write_bytes(gzip.compress("\n".join(lines).encode()))

    script = cache / "fillets-ng-data.unpacked/usr/share/games/fillets-ng/script/cave/dialogs_nl.lua"
    script.parent.mkdir(parents=True)
    script.write_text(
        'dialogId("c-1", "font_big", "Wait.")\ndialogStr("Wacht even,\\n \\"vis\\".")\n'
        'dialogId("c-2", "font_small", "%1 left")\ndialogStr("nog %1")\n'
    )
    voices = cache / "fillets-ng-data-nl.unpacked/usr/share/games/fillets-ng/sound/cave/nl"
    for name in ("c-1", "c-2"):
        sound(voices / f"{name}.ogg", 1.2, 22050)

    stamps = cache / "tuxpaint-stamps-default.unpacked/usr/share/tuxpaint/stamps/animals"
    sound(stamps / "cat_desc.ogg", 1.0, 44100)
    sound(stamps / "cat_desc_nl.ogg", 1.0, 44100)
    sound(stamps / "cat_desc_fr.ogg", 1.0, 44100)  # no French text
    (stamps / "cat.txt").write_text("A cat.\nnl.utf8=Een kat.\n")
    return cache


@pytest.fixture(scope="module")
def speech(packages: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("speech")
    run("prepare_offline_speech.py", "--out", out, "--cache", packages, "--languages", "en", "nl")
    return out


def run(script: str, *arguments: object) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PATH": "/nowhere"}  # nothing may be downloaded
    command = [sys.executable, str(ROOT / "data" / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rows_of(speech: Path, split: str) -> list[dict]:
    path = speech / f"{split}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_what_is_taken_and_what_is_said(speech: Path) -> None:
    found = {row["id"]: row for split in SPLITS for row in rows_of(speech, split)}
    asterisk = {f"asterisk/en/vm-{index}" for index in range(60)} | {"asterisk/en/twin"}
    assert set(found) == asterisk | {"fillets/nl/cave/c-1", "tuxpaint/en/animals/cat_en", "tuxpaint/nl/animals/cat_nl"}
    fish = found["fillets/nl/cave/c-1"]
    assert (fish["text"], fish["speaker"], fish["licence"]) == ('Wacht even, "vis".', "fillets-nl-big", "GPL-2.0-only")
    assert found["tuxpaint/nl/animals/cat_nl"]["text"] == "Een kat."
    assert found["asterisk/en/vm-3"]["duration_s"] == 2.0


def test_no_text_stands_in_two_splits(speech: Path) -> None:
    texts = {split: {(row["language"], normalise(row["text"])) for row in rows_of(speech, split)} for split in SPLITS}
    assert sum(map(len, texts.values())) == len(set().union(*texts.values())) == 63
    homes = [split for split in SPLITS for row in rows_of(speech, split) if row["id"].endswith(("/vm-0", "/twin"))]
    assert len(homes) == 2 and homes[0] == homes[1]
    counts = [len(rows_of(speech, split)) for split in SPLITS]
    assert counts == [41, 14, 2, 7]  # where the hash put them once, so that splits never move


def test_manifests_of_one_language_point_to_the_same_sounds(speech: Path) -> None:
    whole = {item.id: item for split in SPLITS for item in _read(speech / f"{split}.jsonl")}
    parts = {
        item.id: item for code in ("en", "nl") for split in SPLITS for item in _read(speech / code / f"{split}.jsonl")
    }
    assert parts.keys() == whole.keys()
    for key, item in whole.items():
        assert item.audio is not None and parts[key].audio == item.audio
        assert duration_s_of(item.audio) == pytest.approx(item.duration_s)
        assert soundfile.info(item.audio.path).samplerate == 16000


def _read(path: Path) -> list:
    return read_manifest(path) if path.exists() else []


def test_copies_at_other_speeds(speech: Path, tmp_path: Path) -> None:
    run("speed_copies.py", speech / "sft_train.jsonl", "--speeds", "0.8", "1.25", "--out", tmp_path)
    originals = {row["id"]: row for row in rows_of(speech, "sft_train")}
    copies = rows_of(tmp_path, "sft_train")
    assert len(copies) == 2 * len(originals) and len({row["id"] for row in copies}) == len(copies)
    for row in copies:
        name, _, speed = row["id"].rpartition("/x")
        assert row["text"] == originals[name]["text"]
        assert row["duration_s"] == pytest.approx(originals[name]["duration_s"] / float(speed), abs=2e-3)
        assert duration_s_of(AudioRef(str(tmp_path / row["audio"]))) == pytest.approx(row["duration_s"], abs=1e-3)
    # a tape that runs faster sounds higher: 0.3 radians a sample at 8 kHz are 382 Hz
    fast = next(row for row in copies if row["id"].startswith("asterisk") and row["id"].endswith("x1.25"))
    samples, rate_hz = soundfile.read(tmp_path / fast["audio"])
    peak_hz = np.abs(np.fft.rfft(samples)).argmax() * rate_hz / len(samples)
    assert peak_hz == pytest.approx(0.3 * 8000 / (2 * np.pi) * 1.25, rel=0.01)


def test_a_package_that_is_nowhere_is_told(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PATH": "/nowhere"}
    script = str(ROOT / "data" / "prepare_offline_speech.py")
    command = [sys.executable, script, "--out", str(tmp_path), "--cache", str(tmp_path / "c"), "--languages", "fr"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode != 0
    assert "apt-get is not installed: apt-get download asterisk-core-sounds-fr needs it" in done.stderr
