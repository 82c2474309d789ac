"""The scripts in data/ on small fakes of the corpora: every text, audio and speaker is where it should be."""

from __future__ import annotations

import gzip
import importlib.util
import json
from pathlib import Path
from types import ModuleType

import datasets
import numpy as np
import pytest
import soundfile

from speechrl.data.audio import load_audio
from speechrl.data.checks import check_utterances
from speechrl.data.manifest import read_manifest, write_manifest
from speechrl.types import AudioRef, Utterance
from tests import corpora

SCRIPTS = Path(__file__).parent.parent / "data"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"prepare_{name}", SCRIPTS / f"prepare_{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def prepare(name: str, folder: Path, out: Path, *flags: str) -> dict[str, list[Utterance]]:
    """The manifests that a script writes; all their audio is there and as long as they say."""
    script(name).main([str(folder), "--out", str(out), *flags])
    found = {path.stem: read_manifest(path) for path in sorted(out.glob("*.jsonl"))}
    for utterances in found.values():
        check_utterances(utterances, min_duration_s=0.1, max_duration_s=30.0, on_error="stop", decode=True)
    return found


def refused(capsys: pytest.CaptureFixture, name: str, folder: Path, out: Path, *flags: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        script(name).main([str(folder), "--out", str(out), *flags])
    assert stopped.value.code == 2
    assert not list(out.glob("*.jsonl"))
    return capsys.readouterr().err


def shown(utterances: list[Utterance]) -> list[tuple]:
    return [(u.id, u.text, u.language, u.metadata.get("speaker")) for u in utterances]


def test_aishell1(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    found = prepare("aishell1", corpora.aishell1(tmp_path), tmp_path / "out")
    assert list(found) == ["dev", "test", "train"]
    assert shown(found["train"]) == [
        ("BAC009S0000W0000", "打开电灯一二", "Chinese", "S0000"),
        ("BAC009S0001W0001", "打开电灯一二三", "Chinese", "S0001"),
    ]
    assert [u.duration_s for u in found["train"]] == [0.5, 0.6]
    out = capsys.readouterr().out
    assert "train.jsonl: 2 utterances, 0.00 h, 2 speakers, 13 characters, left out: 1 without a transcript" in out


def test_librispeech(tmp_path: Path) -> None:
    found = prepare("librispeech", corpora.librispeech(tmp_path), tmp_path / "out", "--lowercase")
    assert list(found) == ["dev-clean", "dev-other", "test-clean", "test-other", "train-clean-100"]
    assert shown(found["train-clean-100"])[:2] == [
        ("103-1240-0000", "turn the light on", "English", "103"),
        ("103-1240-0001", "turn the light on now", "English", "103"),
    ]
    assert {u.metadata["subset"] for u in found["dev-other"]} == {"dev-other"}
    kept = prepare("librispeech", tmp_path / "LibriSpeech", tmp_path / "kept", "--subsets", "dev-clean")
    assert [u.text for u in kept["dev-clean"]] == ["TURN THE LIGHT ON", "TURN THE LIGHT ON NOW"]
    assert list(kept) == ["dev-clean"]


@pytest.mark.parametrize("suffix", ["flac", "opus"])
def test_mls(suffix: str, tmp_path: Path) -> None:
    found = prepare("mls", corpora.mls(tmp_path, suffix), tmp_path / "out")
    assert shown(found["train"]) == [
        ("4800_10003_000000", "mach das licht an 0", "German", "4800"),
        ("4800_10003_000001", "mach das licht an 1", "German", "4800"),
    ]
    limited = prepare(
        "mls", tmp_path / f"mls_german{'_opus' * (suffix == 'opus')}", tmp_path / "few", "--limited", "9hr"
    )
    assert [u.id for u in limited["train"]] == ["4800_10003_000001"] and len(limited["dev"]) == 2


def test_wenetspeech(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = corpora.wenetspeech(tmp_path)
    found = prepare("wenetspeech", folder, tmp_path / "out", "--min_confidence", "0.95")
    train = found["train"]
    assert [(u.id[-6:], u.text) for u in train] == [("S00000", "打开电灯"), ("S00001", "打开电灯零")]
    assert train[1].audio == AudioRef(
        str(folder / "audio/train/youtube/B00000/Y0000000000_train.opus"), None, 1.1, 0.85
    )
    assert train[1].duration_s == 0.85 and train[1].metadata["recording"] == "Y0000000000_train"
    assert [len(found[name]) for name in ("dev", "test_net", "test_meeting")] == [2, 2, 2]
    assert "left out: 1 below --min_confidence, left out: 1 without text" in capsys.readouterr().out
    whole = load_audio(AudioRef(train[1].audio.path))
    part = load_audio(train[1].audio)
    np.testing.assert_allclose(part, whole[17600 : 17600 + 13600], atol=1e-3)
    assert len(prepare("wenetspeech", folder, tmp_path / "large", "--subset", "L", "--splits", "train")["train"]) == 4


def test_gigaspeech(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = corpora.gigaspeech(tmp_path)
    found = prepare("gigaspeech", folder, tmp_path / "out", "--lowercase")
    assert [u.text for u in found["train"]] == ["turn the light on, please.", "is it on?"]
    assert [u.audio.start_s for u in found["train"]] == [0.5, 2.5]
    assert "left out: 1 without speech" in capsys.readouterr().out
    bare = prepare("gigaspeech", folder, tmp_path / "bare", "--no_punctuation", "--splits", "dev")
    assert [u.text for u in bare["dev"]] == ["TURN THE LIGHT ON PLEASE", "IS IT ON"]


def test_an_unknown_tag_of_gigaspeech_is_told(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = corpora.gigaspeech(tmp_path)
    index = folder / "GigaSpeech.json"
    index.write_text(index.read_text().replace("<MUSIC>", "<LAUGH>"))
    message = refused(capsys, "gigaspeech", folder, tmp_path / "out")
    assert "GigaSpeech.json: POD0000000001_S0000001: unknown tag <LAUGH>" in message


def test_kespeech(tmp_path: Path) -> None:
    found = prepare("kespeech", corpora.kespeech(tmp_path), tmp_path / "out")
    assert sorted(found) == ["dev_phase1", "dev_phase2", "test", "train_phase1", "train_phase2"]
    assert shown(found["train_phase2"]) == [
        ("1000001_f5e0d440", "打开电灯", "Chinese", "1000001"),
        ("1000001_f5e0d442", "一二三", "Chinese", "1000001"),
    ]
    assert found["test"][0].metadata["subdialect"] == "Ji-Lu"


@pytest.mark.parametrize("durations", [True, False])
def test_commonvoice(durations: bool, tmp_path: Path) -> None:
    folder = corpora.commonvoice(tmp_path, durations=durations)
    found = prepare("commonvoice", folder, tmp_path / "out")
    assert sorted(found) == ["dev", "test", "train"]
    assert shown(found["dev"]) == [
        ("common_voice_en_10000", "turn it on 1", "English", "client1"),
        ("common_voice_en_10001", "turn it on 1 now", "English", "client1"),
    ]
    assert [u.duration_s for u in found["dev"]] == pytest.approx([0.6, 0.7], abs=0.1)
    other = prepare("commonvoice", folder, tmp_path / "other", "--splits", "other")
    assert other["other"][0].text == 'turn "it" on' and other["other"][0].metadata["gender"] == "male_masculine"


def test_fleurs(tmp_path: Path) -> None:
    found = prepare("fleurs", corpora.fleurs(tmp_path), tmp_path / "out")
    assert shown(found["dev"]) == [
        ("1_100010", "打开，电灯。", "Chinese", None),
        ("1_100011", "打开，电灯。", "Chinese", None),
    ]
    assert [u.duration_s for u in found["dev"]] == [0.5, 0.6] and found["dev"][0].metadata["sentence"] == "1"
    plain = prepare("fleurs", tmp_path / "data" / "cmn_hans_cn", tmp_path / "plain", "--text", "normalised")
    assert plain["dev"][0].text == "打开电灯"


def test_kaldi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    folder = corpora.kaldi(tmp_path)
    monkeypatch.chdir(tmp_path)  # paths of wav.scp are relative to it
    (first, second) = prepare("kaldi", folder, tmp_path / "out", "--language", "en")["train"]
    assert shown([first, second]) == [("u1", "turn it on", "English", "s1"), ("u2", "", "German", "s2")]
    assert first.audio == AudioRef(str(tmp_path / "audio/a.wav"), None, 0.25, 1.0)
    assert second.audio == AudioRef(str(tmp_path / "audio/a.wav"), None, 1.5, 1.5)
    assert "left out: 1 with text, but without audio" in capsys.readouterr().out
    (folder / "segments").unlink()
    corpora.lines(folder / "text", ["a turn it on"])
    (whole,) = prepare("kaldi", folder, tmp_path / "whole", "--audio_root", str(tmp_path))["train"]
    assert whole.audio == AudioRef(str(tmp_path / "audio/a.wav")) and whole.duration_s == 3.0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a flac -c -d -s audio/a.flac |", "wav.scp:1: 'flac -c -d -s audio/a.flac |' is a command, which is not run"),
        ("a data/raw.ark:1234", "wav.scp:1: 'data/raw.ark:1234' lies in a Kaldi archive"),
        ("a -", "is a command"),
        ("a", "wav.scp:1: no path"),
        ("b audio/a.wav", "segments:1: recording a is not in wav.scp"),
        ("a audio/a.wav\na audio/b.wav", "wav.scp:2: a stands already at "),
        ("a audio/b.wav", "audio/b.wav: no such file"),
    ],
)
def test_what_kaldi_directories_may_not_hold(
    line: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = corpora.kaldi(tmp_path)
    (folder / "wav.scp").write_text(line + "\n")
    assert message in refused(capsys, "kaldi", folder, tmp_path / "out", "--audio_root", str(tmp_path))


def test_lhotse(tmp_path: Path) -> None:
    path = corpora.sound(tmp_path / "a.flac", 4.0)
    whole = {"id": "s3", "recording_id": "r", "start": 0.0, "duration": 4.0, "channel": 0, "text": "all"}
    cuts = [corpora.lhotse_cut(path), corpora.lhotse_cut(path, start=0.0, duration=4.0, supervisions=[whole])]
    (tmp_path / "cuts.jsonl.gz").write_bytes(gzip.compress("".join(json.dumps(cut) + "\n" for cut in cuts).encode()))
    first, second, third = prepare("lhotse", tmp_path / "cuts.jsonl.gz", tmp_path / "out", "--language", "de")["cuts"]
    assert shown([first, second]) == [("s1", "turn it on", "English", "p"), ("s2", "off", "German", None)]
    assert first.audio == AudioRef(str(path), None, 1.0, 0.75) and second.audio == AudioRef(str(path), None, 2.0, 1.0)
    assert third.audio == AudioRef(str(path)) and third.duration_s == 4.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"type": "MixedCut"}, "a cut of type 'MixedCut'"),
        ({"recording": None}, "the cut has features, but no recording"),
        ({"id": None, "supervisions": None}, "not a cut of lhotse"),
        ({"recording": {"sources": [{"type": "url"}]}}, r"sources ['url']; one of type 'file' is read"),
        ({"recording": {"sources": [{"type": "file", "channels": [0, 1]}]}}, "channels [0, 1]; write the one that"),
        ({"recording": {"sources": [], "transforms": [{"name": "Speed"}]}}, "changed on the fly"),
    ],
)
def test_what_lhotse_cuts_may_not_hold(
    change: dict, message: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "cuts.jsonl").write_text(json.dumps(corpora.lhotse_cut(tmp_path / "a.flac", **change)) + "\n")
    error = refused(capsys, "lhotse", tmp_path / "cuts.jsonl", tmp_path / "out")
    assert f"{tmp_path}/cuts.jsonl:1: " in error and message in error


def test_datasets(tmp_path: Path) -> None:
    paths = [str(corpora.sound(tmp_path / f"{index}.wav", 0.5 + 0.1 * index)) for index in range(3)]
    columns = {"speech": paths, "sentence": ["one", None, "three"], "speaker": ["a", "b", "c"]}
    dataset = datasets.Dataset.from_dict(columns).cast_column("speech", datasets.Audio())
    dataset.save_to_disk(str(tmp_path / "saved"))
    flags = ("--audio_column", "speech", "--text_column", "sentence", "--language", "de")
    found = prepare("datasets", tmp_path / "saved", tmp_path / "out", *flags)["all"]
    assert shown(found) == [("all:0", "one", "German", "a"), ("all:2", "three", "German", "c")]
    assert found[1].audio == AudioRef(str(tmp_path / "out" / "all.dataset"), 2) and found[1].duration_s == 0.7
    # in place where the column is called audio
    named = datasets.DatasetDict({"dev": dataset.rename_column("speech", "audio")})
    named.save_to_disk(str(tmp_path / "named"))
    (row, _) = prepare("datasets", tmp_path / "named", tmp_path / "out2", "--text_column", "sentence")["dev"]
    assert row.audio == AudioRef(str(tmp_path / "named" / "dev"), 0) and not (tmp_path / "out2/dev.dataset").exists()
    # Parquet files, as a hub's repository has them
    (tmp_path / "hub" / "data").mkdir(parents=True)
    named["dev"].to_parquet(str(tmp_path / "hub" / "data" / "test-00000-of-00001.parquet"))
    (row, _) = prepare("datasets", tmp_path / "hub", tmp_path / "out3", "--text_column", "sentence")["test"]
    assert row.audio == AudioRef(str(tmp_path / "out3" / "test.dataset"), 0)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("aishell1", "transcript/aishell_transcript_v0.8.txt"),
        ("librispeech", "SUBSET/SPEAKER/CHAPTER"),
        ("mls", "train/transcripts.txt"),
        ("wenetspeech", "WenetSpeech.json"),
        ("gigaspeech", "GigaSpeech.json"),
        ("kespeech", "Tasks/ASR/train_phase1/wav.scp"),
        ("commonvoice", "clips"),
        ("fleurs", "audio/*.tar.gz unpacked"),
        ("kaldi", "wav.scp, text"),
        ("lhotse", "expected a file of lhotse cuts"),
    ],
)
def test_a_wrong_folder_is_refused(name: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "wrong" / "inner").mkdir(parents=True)
    message = refused(capsys, name, tmp_path / "wrong", tmp_path / "out")
    assert expected in message and str(tmp_path / "wrong") in message
    if name != "lhotse":
        assert "found inner" in message or name == "librispeech"
        assert "no such folder" in refused(capsys, name, tmp_path / "nowhere", tmp_path / "out")


def test_missing_audio_stops_or_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = corpora.librispeech(tmp_path)
    (folder / "dev-clean/84/121123/84-121123-0001.flac").unlink()
    flags = ("--subsets", "dev-clean")
    message = refused(capsys, "librispeech", folder, tmp_path / "out", *flags)
    assert "84-121123.trans.txt:2: utterance 84-121123-0001: " in message and "--on_error skip" in message
    found = prepare("librispeech", folder, tmp_path / "out", *flags, "--on_error", "skip")
    assert [u.id for u in found["dev-clean"]] == ["84-121123-0000"]
    assert "left out: 1 without usable audio" in capsys.readouterr().out
    other = corpora.aishell1(tmp_path)
    soundfile.write(other / "wav/dev/S1000/BAC009S1000W0000.wav", np.zeros(0), 16000)
    message = refused(capsys, "aishell1", other, tmp_path / "out3", "--splits", "dev")
    assert "BAC009S1000W0000.wav lasts 0.0 s; --on_error skip leaves" in message
    long = corpora.wenetspeech(tmp_path)
    (long / "audio/train/youtube/B00000/Y0000000000_train.opus").unlink()
    assert "no such file" in refused(capsys, "wenetspeech", long, tmp_path / "out2", "--splits", "train")


# --- what is made of manifests --------------------------------------------------------------------------------------


def run(name: str, *words: str) -> None:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(list(words))


def test_hotwords_are_those_that_were_said_and_distractors(tmp_path: Path) -> None:
    corpora.lines(tmp_path / "words.txt", ["Berlin", "New York", "art", "Paris", "Rome", "Berlin"])
    texts = ["from New York to Berlin", "the party is in new york!", "nothing"]
    rows = [{"id": str(index), "prompt": "p", "text": text, "language": "en"} for index, text in enumerate(texts)]
    write_manifest(tmp_path / "m.jsonl", rows)
    flags = ("--words", f"{tmp_path}/words.txt", "--distractors", "2", "--prompt", "Names: {words}.")
    run("add_keywords", f"{tmp_path}/m.jsonl", *flags, "--out", f"{tmp_path}/k.jsonl")
    found = read_manifest(tmp_path / "k.jsonl")
    assert [len(item.keywords) for item in found] == [4, 3, 2]
    assert {"New York", "Berlin"} < set(found[0].keywords) and "New York" in found[1].keywords
    assert found[0].prompt == f"Names: {', '.join(found[0].keywords)}."
    run("add_keywords", f"{tmp_path}/m.jsonl", *flags, "--out", f"{tmp_path}/again.jsonl")
    assert (tmp_path / "again.jsonl").read_bytes() == (tmp_path / "k.jsonl").read_bytes()


def test_noise_becomes_clips_without_text(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    corpora.sound(tmp_path / "noise" / "free" / "a.wav", 4.3)
    corpora.sound(tmp_path / "noise" / "b.flac", 1.0)
    found = prepare("noise", tmp_path / "noise", tmp_path / "out", "--seconds", "2")["noise"]
    assert [(item.id, item.text, item.duration_s) for item in found] == [
        ("b-0", "", 1.0), ("free/a-0", "", 2.0), ("free/a-2", "", 2.0)
    ]  # fmt: skip
    assert "left out: 1 ends below 0.5 s" in capsys.readouterr().out


def test_a_noisy_copy_has_its_levels(tmp_path: Path) -> None:
    corpora.sound(tmp_path / "a.wav", 1.0)
    write_manifest(tmp_path / "m.jsonl", [{"id": "a", "audio": "a.wav", "text": "one", "speaker": "s"}])
    run("make_noisy", f"{tmp_path}/m.jsonl", "--noise", "white", "--snr_db", "0", "20", "--out", f"{tmp_path}/noisy")
    found = read_manifest(tmp_path / "noisy" / "noisy.jsonl")
    assert [(item.id, item.text, dict(item.metadata)) for item in found] == [
        ("a@0dB", "one", {"speaker": "s", "snr_db": 0.0}),
        ("a@20dB", "one", {"speaker": "s", "snr_db": 20.0}),
    ]
    clean = load_audio(AudioRef(str(tmp_path / "a.wav")))
    for item, snr_db in zip(found, (0, 20), strict=True):
        assert item.audio is not None
        noise = load_audio(item.audio) - clean
        assert 10 * np.log10(np.sum(clean**2) / np.sum(noise**2)) == pytest.approx(snr_db, abs=0.1)
