"""The speech synthesis quickstart's corpus: commands for a house in a few espeak-ng voices, without noise or digits.

A line has a clip (`audio`), what it says, and a short recording of the same voice with its transcript. No text stands
in two splits; every text is spoken in every voice. Everything is a function of the seed.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from speechrl.data.audio import write_wav
from speechrl.data.manifest import write_manifest
from speechrl.data.synth import GRIDS, LANGUAGES, RATE_HZ, Espeak

LANGUAGE = "English"
VOICES = {"anna": "en-us+f2", "ben": "en-us+m3"}
SPEAKER_TEXT = "check the radio"
SPEED_WPM, PITCH = 170, 50  # fixed: a model this small has minutes to learn to speak
NUM_CODES = 512
# Texts of each split; together all that there are. Reinforcement learning needs no recordings, so its texts are new.
SPLITS = {"sft_train": 139, "rl_train": 60, "dev": 10, "test": 60}
RECIPE = 1  # raise it when the same seed would give another corpus


def synthesise_voices(out_dir: str | Path, seed: int = 0, scale: float = 1.0) -> Path:
    """Write <out_dir>/<split>.jsonl and clips (16 kHz FLAC) for every split; returns out_dir.

    scale: share of the texts that are taken, at most 1. The same arguments give the same bytes. A folder whose
    corpus.json has these arguments is left as it is. Raises ValueError for a folder with another corpus, a seed below
    0 or a scale above 1.
    """
    if seed < 0:
        raise ValueError(f"--seed is {seed}; it must be at least 0")
    if scale > 1:
        raise ValueError(f"--scale {scale:g}: there are {sum(SPLITS.values())} texts for --task tts; give 1 or less")
    out = Path(out_dir)
    counts = {name: max(1, round(scale * size)) for name, size in SPLITS.items()}
    parameters = {"recipe": f"tts-{RECIPE}", "seed": seed, "texts": counts}
    stamp = out / "corpus.json"
    if stamp.exists():
        found = json.loads(stamp.read_text(encoding="utf-8"))
        if found != parameters:
            raise ValueError(f"--out {out} holds another corpus: {found}, not {parameters}; choose another folder")
        print(f"{out}: the corpus is complete already, nothing to do", flush=True)
        return out
    speaker = Espeak()
    (out / "voices").mkdir(parents=True, exist_ok=True)
    for name, voice in VOICES.items():
        write_wav(out / "voices" / f"{name}.flac", _spoken(speaker, SPEAKER_TEXT, voice), RATE_HZ)
    texts = all_texts()
    random.Random(f"tts:{RECIPE}:{seed}").shuffle(texts)
    for name, count in counts.items():
        chosen, texts = texts[:count], texts[count:]
        write_manifest(out / f"{name}.jsonl", list(_clips(out, speaker, name, chosen)))
    write_manifest(stamp, [parameters])
    print(f"{out}: {sum(counts.values())} texts in {len(VOICES)} voices, seed {seed}", flush=True)
    return out


def all_texts() -> list[str]:
    """Every text of the corpus but the speakers' own."""
    return [item.text for item in GRIDS["command"](LANGUAGES[LANGUAGE]) if item.text != SPEAKER_TEXT]


def vocabulary_words() -> list[str]:
    """The words of all texts, which are worth a token of their own."""
    return sorted({word for text in [*all_texts(), SPEAKER_TEXT] for word in text.split()})


def _clips(out: Path, speaker: Espeak, split: str, texts: list[str]) -> Iterator[dict[str, object]]:
    folder = out / "audio" / split
    folder.mkdir(parents=True, exist_ok=True)
    for index, (text, name) in enumerate((text, name) for text in texts for name in VOICES):
        samples = _spoken(speaker, text, VOICES[name])
        write_wav(folder / f"{index:05d}.flac", samples, RATE_HZ)
        yield {
            "id": f"{split}-{index:05d}",
            "text": text,
            "audio": f"audio/{split}/{index:05d}.flac",
            "duration_s": len(samples) / RATE_HZ,
            "language": LANGUAGE,
            "voice": name,
            "speaker_audio": f"voices/{name}.flac",
            "speaker_text": SPEAKER_TEXT,
        }


def _spoken(speaker: Espeak, text: str, voice: str) -> np.ndarray:
    samples = speaker.synthesise(text, voice, SPEED_WPM, PITCH)
    return 0.6 * samples / np.abs(samples).max()
