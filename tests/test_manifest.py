"""Manifests: what is read, and that every error names file:line and what to do."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import numpy as np
import pytest
import soundfile

from speechrl.data.manifest import ManifestError, read_manifest, read_manifests, row_of, write_manifest
from speechrl.types import AudioRef


def manifest(folder: Path, content: str | bytes, name: str = "m.jsonl") -> str:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def test_every_field_is_read(tmp_path: Path) -> None:
    row = {
        "id": "u1",
        "audio": "clips/a.wav",
        "text": "打开厨房的灯",
        "prompt": "Transcribe.",
        "language": "Chinese",
        "keywords": ["厨房", "灯"],
        "duration_s": 1.5,
        "speaker": "s7",
        "snr_db": 12,
    }
    (utterance,) = read_manifest(manifest(tmp_path, json.dumps(row, ensure_ascii=False)))
    assert utterance.id == "u1" and utterance.text == "打开厨房的灯" and utterance.prompt == "Transcribe."
    assert utterance.audio == AudioRef(str(tmp_path / "clips" / "a.wav"))
    assert utterance.language == "Chinese" and utterance.keywords == ("厨房", "灯") and utterance.duration_s == 1.5
    assert utterance.metadata == {"speaker": "s7", "snr_db": 12}
    assert utterance.where == f"{tmp_path}/m.jsonl:1"


def test_defaults_and_absolute_paths(tmp_path: Path) -> None:
    path = manifest(
        tmp_path,
        '{"audio": "/data/x.wav", "text": "", "duration": 2, "id": null}\n{"prompt": "1+1=", "text": "2", "id": 7}',
    )
    silence, text_task = read_manifest(path)
    assert (silence.id, silence.text, silence.duration_s) == ("m:1", "", 2.0)
    assert silence.audio == AudioRef("/data/x.wav") and silence.keywords == () and silence.language is None
    assert (text_task.id, text_task.audio, text_task.prompt) == ("7", None, "1+1=")


def test_bom_crlf_blank_lines_and_line_separators_are_tolerated(tmp_path: Path) -> None:
    body = '{"prompt": "a", "text": "x\u2028y"}\r\n\r\n{"prompt": "b", "text": "z"}\r\n \r\n\r\n'
    utterances = read_manifest(manifest(tmp_path, b"\xef\xbb\xbf" + body.encode()))
    assert [(u.id, u.text) for u in utterances] == [("m:1", "x\u2028y"), ("m:3", "z")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{text: 1}", "not JSON .*one JSON object a line"),
        ('["a"]', "a list, not an object"),
        ('{"audio": "a.wav", "sentence": "x"}', r"no `text` \(keys: \['audio', 'sentence'\]\)"),
        ('{"audio": "a.wav", "text": null}', "no `text`"),
        ('{"text": "x", "audio_filepath": "a.wav"}', "neither `audio` nor `prompt` .*audio_filepath"),
        ('{"text": 5, "audio": "a.wav"}', r"`text` is 5 \(int\); it must be str"),
        ('{"text": "x", "audio": ["a.wav"]}', r"`audio` is \['a.wav'\] \(list\)"),
        ('{"text": "x", "audio": ""}', "`audio` is empty"),
        ('{"text": "x", "prompt": "p", "id": true}', r"`id` is True \(bool\); it must be str or int"),
        ('{"text": "x", "prompt": "p", "id": ""}', "`id` is empty"),
        ('{"text": "x", "prompt": "p", "keywords": "灯"}', "`keywords` is '灯'"),
        ('{"text": "x", "prompt": "p", "keywords": ["灯", 1]}', "must be a list of words"),
        ('{"text": "x", "prompt": "p", "duration_s": "1.5"}', "`duration_s` is '1.5'"),
        ('{"text": "x", "prompt": "p", "duration": 0}', "`duration` is 0; it must be seconds above 0"),
        ('{"text": "x", "prompt": "p", "duration_s": NaN}', "NaN is not JSON; use null"),
        (r'{"text": "a\ud83d", "prompt": "p"}', r"`text` holds '.ud83d', half of a surrogate pair"),
        (r'{"text": "x", "prompt": "p", "keywords": ["a\uDE00"]}', "`keywords` holds .* half of a surrogate pair"),
        (r'{"text": "x", "prompt": "p", "speaker": {"a\ud83d": 1}}', "`speaker` holds .* half of a surrogate pair"),
        (r'{"text": "x\u0000", "prompt": "p"}', "`text` is .* which is no text"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = manifest(tmp_path, '{"prompt": "p", "text": "fine"}\n\n' + line + "\n")
    with pytest.raises(ManifestError, match=message) as caught:
        read_manifest(path)
    assert str(caught.value).startswith(f"{path}:3: ")


def test_an_escaped_pair_is_one_character(tmp_path: Path) -> None:
    path = manifest(tmp_path, r'{"text": "\ud83d\ude00", "prompt": "p"}')
    assert read_manifest(path)[0].text == "\U0001f600"


def test_other_encodings_are_named(tmp_path: Path) -> None:
    path = manifest(tmp_path, '{"prompt": "p", "text": "灯"}'.encode("gbk"))
    with pytest.raises(ManifestError, match=r"m.jsonl:1: not UTF-8"):
        read_manifest(path)


def test_missing_and_empty_manifests(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"nowhere.jsonl: no such manifest.*--data.prompt_dataset"):
        read_manifest(tmp_path / "nowhere.jsonl")
    with pytest.raises(ManifestError, match=r"m.jsonl: the manifest is empty"):
        read_manifest(manifest(tmp_path, "\n\r\n"))
    with pytest.raises(ManifestError, match="a folder that is no `datasets` dataset"):
        read_manifest(tmp_path)


def test_duplicate_ids_name_both_lines(tmp_path: Path) -> None:
    first = '{"id": "a", "prompt": "p", "text": "1"}\n{"id": "b", "prompt": "p", "text": "2"}\n'
    path = manifest(tmp_path, first + '{"id": "a", "prompt": "p", "text": "3"}')
    with pytest.raises(ManifestError, match=r"m.jsonl:3: id 'a' stands already at .*m.jsonl:1"):
        read_manifest(path)
    one = manifest(tmp_path, first, "one.jsonl")
    two = manifest(tmp_path, '{"id": "b", "prompt": "p", "text": "2"}', "two.jsonl")
    with pytest.raises(ManifestError, match=r"two.jsonl:1: id 'b' stands already at .*one.jsonl:2"):
        read_manifests([one, two])
    with pytest.raises(ManifestError, match=r"one.jsonl:1: id 'a' stands already at .*one.jsonl:1"):
        read_manifests([one, one])


def test_several_manifests_are_concatenated_in_order(tmp_path: Path) -> None:
    paths = [manifest(tmp_path, f'{{"prompt": "p", "text": "{name}"}}', f"{name}.jsonl") for name in "ba"]
    assert [u.id for u in read_manifests(paths)] == ["b:1", "a:1"]


def test_write_manifest_round_trip_and_atomicity(tmp_path: Path) -> None:
    path = tmp_path / "new" / "m.jsonl"
    rows = [{"id": "a", "prompt": "p", "text": "灯"}, {"id": "b", "prompt": "p", "text": ""}]
    write_manifest(path, rows)
    assert path.read_text(encoding="utf-8").splitlines()[0] == '{"id": "a", "prompt": "p", "text": "灯"}'
    assert [u.text for u in read_manifest(path)] == ["灯", ""]

    def breaks():
        yield rows[0]
        raise RuntimeError("halfway")

    before = path.read_bytes()
    with pytest.raises(RuntimeError, match="halfway"):
        write_manifest(path, breaks())
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == ["m.jsonl"]  # no temporary file stays


def test_a_datasets_folder(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", np.zeros(160, np.float32), 16000)
    columns = {
        "audio": [str(tmp_path / "a.wav")] * 2,
        "text": ["one", "二"],
        "keywords": [["one"], None],
        "language": ["English", None],
        "speaker": ["s1", "s2"],
    }
    dataset = datasets.Dataset.from_dict(columns).cast_column("audio", datasets.Audio())
    folder = tmp_path / "corpus"
    dataset.save_to_disk(str(folder))
    first, second = read_manifest(folder)
    assert (first.id, first.text, first.keywords, first.language) == ("corpus:0", "one", ("one",), "English")
    assert first.audio == AudioRef(str(folder), 0) and second.audio == AudioRef(str(folder), 1)
    assert (second.keywords, second.language, dict(second.metadata)) == ((), None, {"speaker": "s2"})
    assert second.where == f"{folder}:1"

    plain = datasets.Dataset.from_dict({"audio": ["a.wav"], "text": ["x"]})
    plain.save_to_disk(str(tmp_path / "plain"))
    with pytest.raises(ManifestError, match="not an Audio feature; cast it"):
        read_manifest(tmp_path / "plain")
    datasets.DatasetDict({"train": dataset, "dev": dataset}).save_to_disk(str(tmp_path / "both"))
    with pytest.raises(ManifestError, match=r"holds the splits \['dev', 'train'\]; give one of them, as .*both/dev"):
        read_manifest(tmp_path / "both")


def test_a_segment_and_a_row_of_a_dataset_are_read(tmp_path: Path) -> None:
    lines = [
        {"audio": "long.opus", "text": "a", "offset_s": 12.5, "duration_s": 2},
        {"audio": "long.opus", "text": "b", "offset": 0, "duration": 1.5},
        {"audio": "saved", "row": 3, "text": "c"},
    ]
    first, second, third = read_manifest(manifest(tmp_path, "\n".join(map(json.dumps, lines))))
    assert first.audio == AudioRef(str(tmp_path / "long.opus"), None, 12.5, 2.0) and first.duration_s == 2.0
    assert str(first.audio) == f"{tmp_path}/long.opus@12.5-14.5s"
    assert second.audio == AudioRef(str(tmp_path / "long.opus"), None, 0.0, 1.5)
    assert third.audio == AudioRef(str(tmp_path / "saved"), 3)
    assert first.metadata == second.metadata == third.metadata == {}


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"offset_s": 1}, "`offset_s` without `duration_s`; a segment needs both"),
        ({"offset_s": -1, "duration_s": 1}, "`offset_s` is -1; it must be seconds, 0 or more"),
        ({"offset_s": "1", "duration_s": 1}, r"`offset_s` is '1' \(str\)"),
        ({"row": -1}, "`row` is -1; rows of a dataset count from 0"),
        ({"row": 1.0}, r"`row` is 1.0 \(float\); it must be int"),
    ],
)
def test_a_wrong_segment_is_named(extra: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=f"m.jsonl:1: {message}"):
        read_manifest(manifest(tmp_path, json.dumps({"audio": "a.wav", "text": "x"} | extra)))


def test_an_utterance_reads_back_as_its_line(tmp_path: Path) -> None:
    lines = [
        {"id": "a", "audio": "clips/a.wav", "text": "灯", "language": "zh", "keywords": ["灯"], "speaker": "s1"},
        {"id": "b", "audio": str(tmp_path.parent / "b.opus"), "text": "", "offset_s": 3.25, "duration_s": 1.0},
        {"id": "c", "prompt": "1+1=", "text": "2", "difficulty": 0.5},
        {"id": "d", "audio": "saved", "row": 2, "text": "x"},
    ]
    read = read_manifest(manifest(tmp_path, "\n".join(map(json.dumps, lines))))
    rows = [row_of(utterance, tmp_path) for utterance in read]
    assert rows == lines
    elsewhere = tmp_path / "sub" / "m.jsonl"
    write_manifest(elsewhere, (row_of(utterance, elsewhere.parent) for utterance in read))
    assert [(u.audio, u.metadata) for u in read_manifest(elsewhere)] == [(u.audio, u.metadata) for u in read]
