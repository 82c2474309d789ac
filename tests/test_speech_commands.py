"""The synthesis quickstart's corpus, the codec that is made from it, and codes in manifests."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from speechrl.config import EncodeSpeechConfig, MakeCodecConfig
from speechrl.data.manifest import read_manifest
from speechrl.data.synth_tts import SPEAKER_TEXT, SPLITS, VOICES, synthesise_voices, vocabulary_words
from speechrl.models.load import load_model
from speechrl.models.speech_prompts import SpeechPromptBuilder
from speechrl.models.tiny import build_speech_lm
from speechrl.speech_commands import encode_speech, make_codec

CODES = 64


def digest(folder: Path) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthesise_voices(tmp_path_factory.mktemp("tts") / "corpus", seed=1, scale=0.1)


def test_the_corpus_is_a_function_of_its_seed(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert digest(synthesise_voices(tmp_path / "again", seed=1, scale=0.1)) == digest(corpus)
    assert digest(synthesise_voices(tmp_path / "other", seed=2, scale=0.1)) != digest(corpus)
    synthesise_voices(corpus, seed=1, scale=0.1)
    assert "complete already" in capsys.readouterr().out
    with pytest.raises(ValueError, match="holds another corpus"):
        synthesise_voices(corpus, seed=2, scale=0.1)
    with pytest.raises(ValueError, match="--scale 2: there are 269 texts"):
        synthesise_voices(tmp_path / "big", scale=2.0)


def test_no_text_stands_in_two_splits_and_all_voices_in_each(corpus: Path):
    splits = {name: read_manifest(corpus / f"{name}.jsonl") for name in SPLITS}
    sizes = {name: len(lines) for name, lines in splits.items()}
    assert sizes == {"sft_train": 28, "rl_train": 12, "dev": 2, "test": 12}  # a tenth of the texts in two voices
    texts = {name: {line.text for line in lines} for name, lines in splits.items()}
    for name in ("rl_train", "dev", "test"):
        assert not texts[name] & texts["sft_train"]
    assert not (texts["dev"] | texts["rl_train"]) & texts["test"]
    for lines in splits.values():
        assert {line.metadata["voice"] for line in lines} == set(VOICES)
        assert all(line.speaker.text == SPEAKER_TEXT and Path(line.speaker.audio.path).exists() for line in lines)


def test_codes_get_into_a_manifest_and_out_of_a_model(corpus: Path, tmp_path: Path):
    codec = make_codec(
        MakeCodecConfig(manifest=str(corpus / "sft_train.jsonl"), out=str(tmp_path / "codec"), num_codes=CODES)
    )
    coded = encode_speech(
        EncodeSpeechConfig(manifest=str(corpus / "test.jsonl"), out=str(tmp_path / "t.jsonl"), codec=str(codec))
    )
    line = read_manifest(coded)[0]
    assert len(line.codes) == -(-round(line.duration_s * 16000) // 640)
    assert line.audio == read_manifest(corpus / "test.jsonl")[0].audio  # the manifest moved, the paths still hold
    assert line.speaker.codes and Path(json.loads(coded.read_text().splitlines()[0])["audio"]).is_absolute()
    build_speech_lm(tmp_path / "model", "abc", vocabulary_words(), CODES, width=32, layers=1)
    builder = SpeechPromptBuilder(load_model(str(tmp_path / "model")), "llasa")
    assert builder.codes_of(builder.label_ids(line, with_language=False)) == line.codes
    # words have a token each: a prompt is short
    assert len(builder.prepare(line).prompt.token_ids) < 25 + len(line.speaker.codes) + 2 * len(line.text.split()) + 6


def test_too_many_codes_are_told(corpus: Path, tmp_path: Path):
    with pytest.raises(ValueError, match=r"--manifest .*too few for 60000 codes.*--num_codes"):
        make_codec(MakeCodecConfig(manifest=str(corpus / "dev.jsonl"), out=str(tmp_path), num_codes=60000))


def test_a_place_that_can_not_be_written_is_told_before_anything_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    out = str(tmp_path / "file" / "a")
    with pytest.raises(ValueError, match=r"--out .*/file/a/vq.npz can't be written: "):
        make_codec(MakeCodecConfig(manifest="absent.jsonl", out=out))
    with pytest.raises(ValueError, match=r"--out .*/file/a can't be written: "):
        encode_speech(EncodeSpeechConfig(manifest="absent.jsonl", codec="absent", out=out))
