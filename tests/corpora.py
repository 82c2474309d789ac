"""Small fakes of corpora, in the layouts that they ship in. Texts hold what the tiny models' tokenizers can write."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import soundfile

RATE_HZ = 16000


def sound(path: Path, duration_s: float, rate_hz: int = RATE_HZ) -> Path:
    """A file of noise that grows louder, so that parts of it can be told apart."""
    path.parent.mkdir(parents=True, exist_ok=True)
    count = round(duration_s * rate_hz)
    noise = np.random.default_rng(count).standard_normal(count) * np.linspace(0.01, 0.1, count)
    subtype = {".opus": "OPUS", ".ogg": "VORBIS"}.get(path.suffix)
    kind = "OGG" if subtype else None
    soundfile.write(path, noise.astype(np.float32), rate_hz, subtype=subtype, format=kind)
    return path


def lines(path: Path, rows: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")


def aishell1(root: Path, per_split: int = 2) -> Path:
    """Two speakers a split; one recording of train has no transcript."""
    folder, transcripts = root / "data_aishell", []
    for number, split in enumerate(("train", "dev", "test")):
        for index in range(per_split):
            speaker = f"S{number}{index % 2:03d}"
            name = f"BAC009{speaker}W{index:04d}"
            sound(folder / "wav" / split / speaker / f"{name}.wav", 0.5 + 0.1 * index)
            transcripts.append(f"{name} 打开 电灯  一二{'三' * index}")
    sound(folder / "wav" / "train" / "S0000" / "BAC009S0000W9999.wav", 0.5)
    lines(folder / "transcript" / "aishell_transcript_v0.8.txt", transcripts)
    return folder


def librispeech(root: Path, per_chapter: int = 2) -> Path:
    folder = root / "LibriSpeech"
    lines(folder / "SPEAKERS.TXT", ["; ID | SEX | SUBSET", "103 | F | train-clean-100"])
    for subset, speaker, chapter in (
        ("train-clean-100", 103, 1240),
        ("train-clean-100", 26, 495),
        ("dev-clean", 84, 121123),
        ("dev-other", 116, 288045),
        ("test-clean", 61, 70968),
        ("test-other", 367, 130732),
    ):
        place = folder / subset / str(speaker) / str(chapter)
        rows = []
        for index in range(per_chapter):
            name = f"{speaker}-{chapter}-{index:04d}"
            sound(place / f"{name}.flac", 0.4 + 0.1 * index)
            rows.append(f"{name} TURN THE LIGHT ON {'NOW ' * index}".rstrip())
        lines(place / f"{speaker}-{chapter}.trans.txt", rows)
    return folder


def mls(root: Path, suffix: str = "flac") -> Path:
    folder = root / ("mls_german_opus" if suffix == "opus" else "mls_german")
    for split, speaker in (("train", 4800), ("dev", 252), ("test", 3)):
        names = [f"{speaker}_10003_{index:06d}" for index in range(2)]
        for index, name in enumerate(names):
            sound(folder / split / "audio" / str(speaker) / "10003" / f"{name}.{suffix}", 0.5 + 0.1 * index)
        lines(
            folder / split / "transcripts.txt",
            [f"{name}\tmach das licht an {index}" for index, name in enumerate(names)],
        )
    lines(folder / "train" / "limited_supervision" / "9hr" / "handles.txt", ["4800_10003_000001"])
    return folder


def wenetspeech(root: Path, num_segments: int = 3) -> Path:
    """One recording a split. Of train the last segment has little confidence, one is of L alone, one has no text."""
    folder, audios = root / "WenetSpeech", []
    said = {"train": "打开电灯", "dev": "开", "test_net": "灯", "test_meeting": "电"}
    for split, subsets in (("train", ["L", "M", "S"]), ("dev", ["DEV"]), ("test_net", ["TEST_NET"]),
                           ("test_meeting", ["TEST_MEETING"])):  # fmt: skip
        aid = f"Y0000000000_{split}"
        path = f"audio/{split}/youtube/B00000/{aid}.opus"
        count = num_segments if split == "train" else 2
        sound(folder / path, count + 1)
        segments = [
            {"sid": f"{aid}_S{index:05d}", "begin_time": index + 0.1, "end_time": index + 0.95, "subsets": subsets,
             "confidence": 0.9 if index == num_segments - 1 else 1.0, "text": said[split] + "零一二三打开"[:index]}
            for index in range(count)
        ]  # fmt: skip
        if split == "train":
            other = {"begin_time": 0.0, "end_time": 0.5, "confidence": 1.0}
            segments.append(other | {"sid": f"{aid}_S90000", "subsets": ["L"], "text": "二"})
            segments.append(other | {"sid": f"{aid}_S90001", "subsets": subsets, "text": " "})
        audios.append({"aid": aid, "duration": count + 1, "md5": "0", "path": path, "source": "youtube",
                       "tags": "0", "url": "u", "segments": segments})  # fmt: skip
    (folder / "WenetSpeech.json").write_text(
        json.dumps({"dataset": "WenetSpeech", "audios": audios}, ensure_ascii=False)
    )
    return folder


def gigaspeech(root: Path) -> Path:
    folder, audios = root / "GigaSpeech", []
    texts = ["TURN THE LIGHT ON <COMMA> PLEASE <PERIOD>", "<MUSIC>", "IS IT ON <QUESTIONMARK>"]
    for subset, aid in (("{S}", "POD0000000001"), ("{DEV}", "YOU0000000002"), ("{TEST}", "YOU0000000003")):
        path = f"audio/podcast/P0000/{aid}.opus"
        sound(folder / path, 4.0)
        segments = [
            {"sid": f"{aid}_S{index:07d}", "speaker": "N/A", "begin_time": index + 0.5, "end_time": index + 1.25,
             "text_tn": text, "subsets": ["{XL}", subset]}
            for index, text in enumerate(texts)
        ]  # fmt: skip
        audios.append({"title": "t", "url": "u", "path": path, "aid": aid, "source": "podcast", "codec": "opus",
                       "channels": 1, "md5": "0", "speaker": "N/A", "duration": 4.0, "segments": segments})  # fmt: skip
    index = {"dataset": "GigaSpeech", "language": "EN", "version": "v1.0.0", "audios": audios}
    (folder / "GigaSpeech.json").write_text(json.dumps(index))
    return folder


def kespeech(root: Path) -> Path:
    folder = root / "KeSpeech"
    for number, split in enumerate(("train_phase1", "train_phase2", "dev_phase1", "dev_phase2", "test")):
        rows: dict[str, list[str]] = {name: [] for name in ("wav.scp", "text", "utt2spk", "utt2subdialect", "spk2utt")}
        for index, text in enumerate(("打开 电灯", "<SPOKEN_NOISE>", "一二 <SPOKEN_NOISE> 三")):
            speaker, phase = f"100000{number}", split.rpartition("_")[2]
            name = f"{speaker}_f5e0d44{index}"
            path = f"Audio/{speaker}/{phase}/{name}.wav"
            sound(folder / path, 0.5)
            values = {"wav.scp": path, "text": text, "utt2spk": speaker, "utt2subdialect": "Ji-Lu"}
            for table, value in values.items():
                rows[table].append(f"{name} {value}")
        for table, content in rows.items():
            lines(folder / "Tasks" / "ASR" / split / table, content)
    return folder


def commonvoice(root: Path, per_split: int = 2, durations: bool = True) -> Path:
    folder = root / "cv-corpus-17.0-2024-03-15" / "en"
    header = "client_id path sentence_id sentence sentence_domain up_votes down_votes age gender accents variant"
    clips = ["clip\tduration[ms]"]
    for number, split in enumerate(("train", "dev", "test", "other")):
        rows = [f"{header} locale segment".replace(" ", "\t")]
        for index in range(per_split):
            clip = f"common_voice_en_{number}{index:04d}.mp3"
            sound(folder / "clips" / clip, 0.6 + 0.1 * index, 32000)
            sentence = 'turn "it" on' if split == "other" else f"turn it on {number} {'now ' * index}"
            values = [f"client{number}", clip, "s", sentence, "", "2", "0", "", "male_masculine", "", "", "en", ""]
            rows.append("\t".join(values))
            clips.append(f"{clip}\t{600 + 100 * index}")
        lines(folder / f"{split}.tsv", rows)
    if durations:
        lines(folder / "clip_durations.tsv", clips)
    return folder


def fleurs(root: Path) -> Path:
    """The same sentence is read by two people."""
    folder = root / "data" / "cmn_hans_cn"
    for number, split in enumerate(("train", "dev", "test")):
        rows = []
        for index in range(2):
            name = f"1000{number}{index}.wav"
            path = sound(folder / "audio" / split / name, 0.5 + 0.1 * index)
            samples = soundfile.info(path).frames
            rows.append(f"{number}\t{name}\t打开，电灯。\t打开电灯\t打 开 | 电 灯 |\t{samples}\tFEMALE")
        lines(folder / f"{split}.tsv", rows)
    return folder


def kaldi(root: Path) -> Path:
    """A data directory with segments."""
    folder = root / "data" / "train"
    sound(root / "audio" / "a.wav", 3.0)
    lines(folder / "wav.scp", ["a audio/a.wav"])
    lines(folder / "segments", ["u1 a 0.25 1.25", "u2 a 1.5 -1"])
    lines(folder / "text", ["u1 turn it on", "u2", "u3 no audio"])
    lines(folder / "utt2spk", ["u1 s1", "u2 s2", "u3 s2"])
    lines(folder / "utt2lang", ["u2 de"])
    return folder


def lhotse_cut(path: Path, **changes) -> dict:
    """A MonoCut from 1 s to 3 s of a recording of 4 s, with two supervisions."""
    cut = {
        "id": "cut-1",
        "start": 1.0,
        "duration": 2.0,
        "channel": 0,
        "supervisions": [
            {"id": "s1", "recording_id": "r", "start": 0.0, "duration": 0.75, "channel": 0, "text": "turn it on",
             "language": "English", "speaker": "p"},
            {"id": "s2", "recording_id": "r", "start": 1.0, "duration": 1.0, "channel": 0, "text": "off"},
        ],
        "recording": {
            "id": "r",
            "sources": [{"type": "file", "channels": [0], "source": str(path)}],
            "sampling_rate": 16000,
            "num_samples": 64000,
            "duration": 4.0,
            "channel_ids": [0],
        },
        "type": "MonoCut",
    }  # fmt: skip
    return cut | changes
