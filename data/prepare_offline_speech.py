#!/usr/bin/env python3
"""Recorded human speech with transcripts out of Debian packages: manifests for SFT, RL and evaluation, no hub needed.

    python data/prepare_offline_speech.py --out speech --languages en fr nl es it ro cs da ca

asterisk: telephone prompts read by one voice a language (en es fr it ru), 8 kHz. fillets: acted dialogue of the game
Fish Fillets (cs nl). tuxpaint: short descriptions of pictures, read by volunteers (13 languages). Their licences are
in every line (CC-BY-SA, CC-BY, GPL-2). Up to 400 MB are downloaded, into --cache, where they stay.

Writes 16 kHz mono files below OUT/audio and the manifests sft_train, rl_train, dev, test: OUT/SPLIT.jsonl with all
languages, OUT/LANGUAGE/SPLIT.jsonl with one. The split is a hash of the language and the normalised text, so it never
moves, and no text stands in two of them; voices do, for most languages have one or two.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile
from packages import debian_package

from speechrl.data.audio import AudioError, load_audio
from speechrl.data.manifest import write_manifest
from speechrl.data.normalise import normalise
from speechrl.types import AudioRef

RATE_HZ = 16000
SHARES = {"test": 0.10, "dev": 0.06, "rl_train": 0.24, "sft_train": 0.60}
FORMATS = {"flac": ("FLAC", "PCM_16"), "opus": ("OGG", "OPUS")}
MIN_PEAK = 0.02  # quieter files hold no speech
MAX_CHARACTERS_PER_S = 30.0  # more text than this was not all said


@dataclass(frozen=True)
class Recording:
    """One sound file as a package ships it, with what is said in it."""

    source: str
    language: str
    speaker: str
    name: str
    text: str
    audio: Path
    licence: str


# --- sources --------------------------------------------------------------------------------------------------------

ASTERISK_LICENCES = {
    "en": "CC-BY-SA-3.0",
    "es": "CC-BY-SA-3.0",
    "fr": "CC-BY-SA-3.0",
    "it": "CC-BY-3.0",
    "ru": "CC-BY-3.0",
}
FILLETS_LINE = re.compile(
    r'dialogId\(\s*"([^"]+)"\s*,\s*"([^"]*)"\s*,\s*"(?:[^"\\]|\\.)*"\s*\)\s*dialogStr\(\s*"((?:[^"\\]|\\.)*)"\s*\)',
    re.DOTALL,
)
TUXPAINT_LINE = re.compile(r"([A-Za-z_@]+)\.utf8=(.*)")


def asterisk(language: str, cache: Path) -> Iterator[Recording]:
    """`core-sounds-XX.txt.gz` holds lines "name: text", beside which name.wav lies."""
    if language not in ASTERISK_LICENCES:
        return
    package = f"asterisk-core-sounds-{language}"
    texts = debian_package(package, cache) / f"usr/share/doc/{package}/core-sounds-{language}.txt.gz"
    sounds = debian_package(f"{package}-wav", cache) / "usr/share/asterisk/sounds"
    (voice,) = [path for path in sounds.iterdir() if path.is_dir()]
    seen = set()
    for line in gzip.decompress(texts.read_bytes()).decode("utf-8-sig").splitlines():
        name, colon, text = (part.strip() for part in line.partition(":"))
        # brackets stand for tones and noises, which no text can tell from speech
        if not colon or line.startswith(";") or name in seen or re.search(r"[\[\]<>{}()]", text):
            continue
        audio = voice / f"{name}.wav"
        if audio.is_file():
            seen.add(name)
            yield Recording("asterisk", language, voice.name, name, text, audio, ASTERISK_LICENCES[language])


def fillets(language: str, cache: Path) -> Iterator[Recording]:
    """`dialogs_XX.lua` of a level holds dialogId(key, font, original) dialogStr(text); key.ogg is its sound."""
    if language not in ("cs", "nl"):
        return
    scripts = debian_package("fillets-ng-data", cache) / "usr/share/games/fillets-ng/script"
    sounds = debian_package(f"fillets-ng-data-{language}", cache) / "usr/share/games/fillets-ng/sound"
    for script in sorted(scripts.glob(f"*/dialogs_{language}.lua")):
        level = script.parent.name
        for key, font, raw in FILLETS_LINE.findall(script.read_text("utf-8")):
            text = re.sub(r"\\(.)", lambda escape: " " if escape[1] == "n" else escape[1], raw)
            audio = sounds / level / language / f"{key}.ogg"
            if audio.is_file() and "%" not in text:  # % is filled in by the game
                speaker = f"{language}-{font.removeprefix('font_')}"
                yield Recording("fillets", language, speaker, f"{level}/{key}", text, audio, "GPL-2.0-only")


def tuxpaint(language: str, cache: Path) -> Iterator[Recording]:
    """stamp.txt: English in its first line, then XX.utf8=text; stamp_desc.ogg and stamp_desc_XX.ogg are the sounds."""
    root = debian_package("tuxpaint-stamps-default", cache) / "usr/share/tuxpaint/stamps"
    for script in sorted(root.rglob("*.txt")):
        lines = script.read_text("utf-8", errors="replace").splitlines() or [""]
        texts = {found[1]: found[2].strip() for line in lines[1:] if (found := TUXPAINT_LINE.match(line))}
        texts["en"] = lines[0].strip()
        for audio in sorted(script.parent.glob(f"{script.stem}_desc*")):
            found = re.fullmatch(re.escape(script.stem) + r"_desc(?:_([A-Za-z_]+))?\.(?:ogg|wav)", audio.name)
            locale = (found[1] or "en") if found else ""
            if locale.split("_")[0] == language and texts.get(locale):
                name = f"{script.relative_to(root).with_suffix('')}_{locale}"
                yield Recording("tuxpaint", language, locale, name, texts[locale], audio, "GPL-2.0-only")


SOURCES = {"asterisk": asterisk, "fillets": fillets, "tuxpaint": tuxpaint}

# --- audio, checks, splits ------------------------------------------------------------------------------------------


def split_of(language: str, text: str) -> str:
    """The split of a text: the same for every text that is normalised alike in that language."""
    digest = hashlib.sha256(f"{language}\n{normalise(text, language)}".encode()).digest()
    place = int.from_bytes(digest[:8], "big") / 2**64
    for split, share in SHARES.items():
        if place < share:
            return split
        place -= share
    return "sft_train"


def fault_of(text: str, samples: np.ndarray, min_s: float, max_s: float) -> str:
    """Why a recording is left out; empty if it is not."""
    duration_s = len(samples) / RATE_HZ
    faults = {
        "too short": duration_s < min_s,
        "too long": duration_s > max_s,
        "near silent": np.abs(samples).max(initial=0.0) < MIN_PEAK,
        "text too long for its sound": len(text) > MAX_CHARACTERS_PER_S * duration_s,
        "no letters": not any(character.isalpha() for character in text),
    }
    return next((fault for fault, found in faults.items() if found), "")


def write_recording(recording: Recording, samples: np.ndarray, out: Path, kind: str) -> dict:
    """Write the sound at RATE_HZ; return the manifest's line, its path relative to `out`."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", recording.name)
    path = Path("audio") / recording.source / recording.language / f"{name}.{kind}"
    (out / path).parent.mkdir(parents=True, exist_ok=True)
    container, subtype = FORMATS[kind]
    soundfile.write(out / path, samples, RATE_HZ, format=container, subtype=subtype)
    return {
        "id": f"{recording.source}/{recording.language}/{recording.name}",
        "audio": str(path),
        "text": " ".join(recording.text.split()),
        "language": recording.language,
        "duration_s": round(len(samples) / RATE_HZ, 3),
        "speaker": f"{recording.source}-{recording.speaker}",
        "source": recording.source,
        "licence": recording.licence,
    }


def manifests(rows: list[dict]) -> dict[str, list[dict]]:
    """{"dev.jsonl": lines of all languages, "fr/dev.jsonl": lines of one}."""
    files: dict[str, list[dict]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row["id"]):
        split = split_of(row["language"], row["text"])
        files[f"{split}.jsonl"].append(row)
        files[f"{row['language']}/{split}.jsonl"].append(row | {"audio": f"../{row['audio']}"})
    return files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("speech"))
    parser.add_argument("--cache", type=Path, default=Path("downloads"), help="where packages are kept")
    parser.add_argument("--languages", nargs="+", default=["en"], help="codes, such as en fr")
    parser.add_argument("--sources", nargs="+", choices=SOURCES, default=list(SOURCES))
    parser.add_argument("--format", choices=FORMATS, default="flac", help="opus takes a quarter of the room")
    parser.add_argument("--min_duration_s", type=float, default=0.4)
    parser.add_argument("--max_duration_s", type=float, default=29.9, help="Whisper's window is 30 s")
    options = parser.parse_args()

    rows: list[dict] = []
    dropped: Counter[str] = Counter()
    for language in options.languages:
        for source in options.sources:
            for recording in SOURCES[source](language, options.cache):
                try:
                    samples = load_audio(AudioRef(str(recording.audio)), RATE_HZ)
                except AudioError as error:
                    fault = str(error)
                else:
                    fault = fault_of(recording.text, samples, options.min_duration_s, options.max_duration_s)
                if fault:
                    dropped[f"{source} {language}: {fault}"] += 1
                else:
                    rows.append(write_recording(recording, samples, options.out, options.format))
    if not rows:
        parser.error(f"no recordings of {' '.join(options.languages)} in {' '.join(options.sources)}")
    for name, lines in manifests(rows).items():
        write_manifest(options.out / name, lines)
        print(f"{name:22} {len(lines):6} utterances {sum(row['duration_s'] for row in lines) / 60:7.1f} min")
    for fault, number in sorted(dropped.items()):
        print(f"left out {number:5}  {fault}")


if __name__ == "__main__":
    main()
