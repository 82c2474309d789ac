"""Manifests: a JSONL file or a `datasets` folder -> utterances.

One JSON object a line: `text` (required; "" for silence), `audio` (relative to the manifest's folder, or absolute),
`id`, `prompt`, `language`, `keywords` (list of words), `duration_s` (seconds). With `offset_s` the audio is the segment
of `duration_s` seconds that starts there; with `row` it is that row of the `datasets` folder at `audio`. Every other
key becomes metadata. Of speech synthesis: `speaker_audio` (a recording of the voice), `speaker_text` (what it says),
`voice` (a name that the model knows; metadata), and what `speechrl encode-speech` adds: `codes`, `speaker_codes` (a
list of codes per frame). A `datasets` folder (save_to_disk) has the same names as columns, `audio` being an Audio
feature.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from speechrl.disk import write_lines
from speechrl.types import AudioRef, Codes, Speaker, Utterance

KNOWN = (
    "id", "text", "audio", "row", "offset_s", "offset", "prompt", "language", "keywords", "duration_s", "duration",
)  # fmt: skip
OF_SPEECH = ("speaker_audio", "speaker_text", "speaker_codes", "codes")


class ManifestError(ValueError):
    """A manifest that can't be used. The message names file:line and the remedy."""


def read_manifest(path: str | Path) -> list[Utterance]:
    """The utterances of one manifest, in its order. No audio is opened.

    path: a JSONL file (a BOM, CRLF and blank lines are tolerated), or the folder of a dataset saved with save_to_disk.
    Raises ManifestError, naming file:line, for anything that is not an utterance, and for an id that stands twice.
    """
    source = Path(path)
    if not source.exists():
        raise ManifestError(f"{source}: no such manifest; check the path (--data.prompt_dataset, --eval.dataset)")
    utterances = list(_read_dataset(source) if source.is_dir() else _read_jsonl(source))
    if not utterances:
        raise ManifestError(f"{source}: the manifest is empty; it needs at least one utterance")
    _refuse_duplicates(utterances)
    return utterances


def read_manifests(paths: Sequence[str]) -> list[Utterance]:
    """The utterances of several manifests, one after the other.

    Raises ManifestError as `read_manifest` does, and for an id that stands in two of them.
    """
    utterances = [utterance for path in paths for utterance in read_manifest(path)]
    _refuse_duplicates(utterances)
    return utterances


def write_manifest(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write JSONL in one move (disk.write_lines). Raises OSError."""
    write_lines(path, (json.dumps(row, ensure_ascii=False) for row in rows))


def row_of(utterance: Utterance, folder: Path) -> dict[str, Any]:
    """The line of a manifest in `folder` that reads back as this utterance."""
    audio = utterance.audio
    row = {
        "id": utterance.id,
        "audio": None if audio is None else audio_name(audio.path, folder),
        "row": None if audio is None else audio.row,
        "offset_s": None if audio is None else audio.start_s,
        "duration_s": utterance.duration_s,
        "text": utterance.text,
        "prompt": utterance.prompt,
        "language": utterance.language,
        "keywords": list(utterance.keywords) or None,
    }
    return {key: value for key, value in row.items() if value is not None} | dict(utterance.metadata)


def audio_name(path: str | Path, folder: Path) -> str:
    """How a manifest in `folder` names a sound file: relative to it where the file lies below it, else absolute."""
    audio, base = os.path.abspath(path), os.path.abspath(folder)
    return os.path.relpath(audio, base) if audio.startswith(os.path.join(base, "")) else audio


def read_rows(path: Path) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """("file:line", line, object) of every line of a JSONL file (or .gz of one); a BOM, CRLF and blank lines are
    tolerated.

    Raises ManifestError, naming file:line, for what is not UTF-8, not JSON, not an object, or holds half a surrogate
    pair, which no file and no request could hold again.
    """
    # Split at b"\n" only: str.splitlines would also cut at U+2028, which JSON allows inside a string.
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:  # gzip's own errors are OSErrors without strerror
        raise ManifestError(f"{path}: can't be read ({getattr(error, 'strerror', None) or error})") from error
    for number, raw in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not raw.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant)
        except UnicodeDecodeError as error:
            raise ManifestError(f"{where}: not UTF-8 ({error}); save the file as UTF-8") from error
        except (ValueError, RecursionError) as error:  # ValueError: also an integer of thousands of digits
            raise ManifestError(f"{where}: not JSON ({error}); one JSON object a line is needed") from error
        if not isinstance(row, dict):
            raise ManifestError(f'{where}: a {type(row).__name__}, not an object; write {{"text": ...}}')
        if b"\\ud" in raw or b"\\uD" in raw:  # UTF-8 has no surrogates; an escape may be one
            _refuse_surrogates(row, where)
        yield where, number, row


def _refuse_surrogates(row: Mapping[str, Any], where: str) -> None:
    for key, value in row.items():
        try:
            json.dumps({key: value}, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            found = error.object[error.start]
            raise ManifestError(
                f"{where}: `{key}` holds {found!r}, half of a surrogate pair, which is no text"
            ) from None


def _read_jsonl(path: Path) -> Iterator[Utterance]:
    for where, number, row in read_rows(path):
        audio = _text(row, "audio", where)
        if audio == "":
            raise ManifestError(f"{where}: `audio` is empty; give a path, or leave the key out for a text task")
        ref = None if audio is None else _audio_ref(row, os.path.normpath(path.parent / audio), where)
        yield _utterance(row, ref, where, f"{path.stem}:{number}", path.parent)


def _audio_ref(row: Mapping[str, Any], path: str, where: str) -> AudioRef:
    index = typed(row, "row", int, where)
    if index is not None and index < 0:
        raise ManifestError(f"{where}: `row` is {index}; rows of a dataset count from 0")
    key = "offset_s" if row.get("offset_s") is not None else "offset"
    offset_s = typed(row, key, (float, int), where)
    if offset_s is None:
        return AudioRef(path, index)
    if not (math.isfinite(offset_s) and offset_s >= 0):
        raise ManifestError(f"{where}: `{key}` is {offset_s}; it must be seconds, 0 or more")
    length_s = read_duration_s(row, where)
    if length_s is None:
        raise ManifestError(f"{where}: `{key}` without `duration_s`; a segment needs both")
    return AudioRef(path, index, float(offset_s), length_s)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON; use null")


def _read_dataset(path: Path) -> Iterator[Utterance]:
    import datasets  # takes a second to import; most manifests are JSONL

    try:
        dataset = datasets.load_from_disk(str(path))
    except (FileNotFoundError, ValueError) as error:
        raise ManifestError(
            f"{path}: a folder that is no `datasets` dataset ({error}); give a JSONL file, or a folder written by "
            "save_to_disk"
        ) from error
    if isinstance(dataset, datasets.DatasetDict):
        raise ManifestError(f"{path}: holds the splits {sorted(dataset)}; give one of them, as {path}/{min(dataset)}")
    has_audio = "audio" in dataset.column_names
    if has_audio and not isinstance(dataset.features["audio"], datasets.Audio):
        raise ManifestError(
            f"{path}: column `audio` is {dataset.features['audio']}, not an Audio feature; cast it with "
            'cast_column("audio", datasets.Audio())'
        )
    rows = dataset.remove_columns("audio") if has_audio else dataset  # the rows without decoding or copying their audio
    for index, row in enumerate(rows):
        where = f"{path}:{index}"
        ref = _audio_ref({**row, "row": index}, str(path), where) if has_audio else None
        yield _utterance(row, ref, where, f"{path.name}:{index}", path)


def _utterance(row: Mapping[str, Any], audio: AudioRef | None, where: str, default_id: str, folder: Path) -> Utterance:
    """Raises ManifestError when a value is missing or has the wrong type. A null counts as missing."""
    text, prompt = _text(row, "text", where), _text(row, "prompt", where)
    if text is None:
        raise ManifestError(f'{where}: no `text` (keys: {sorted(row)}); give the reference, "" for silence')
    speaker = _speaker(row, where, folder)
    if audio is None and prompt is None and speaker is None and row.get("voice") is None:
        raise ManifestError(
            f"{where}: neither `audio` nor `prompt` (keys: {sorted(row)}); give the model an input (to be spoken: "
            "`speaker_audio` or `voice`)"
        )
    id_ = typed(row, "id", (str, int), where)
    if id_ == "":
        raise ManifestError(f"{where}: `id` is empty; give a name, or leave the key out")
    return Utterance(
        id=default_id if id_ is None else str(id_),
        text=text,
        audio=audio,
        prompt=prompt,
        language=_text(row, "language", where) or None,
        keywords=_keywords(row, where),
        duration_s=read_duration_s(row, where),
        metadata={key: value for key, value in row.items() if key not in (*KNOWN, *OF_SPEECH)},
        where=where,
        speaker=speaker,
        codes=_codes(row, "codes", where),
    )


def _speaker(row: Mapping[str, Any], where: str, folder: Path) -> Speaker | None:
    audio = typed(row, "speaker_audio", str, where)
    text, codes = typed(row, "speaker_text", str, where), _codes(row, "speaker_codes", where)
    if not audio and (text or codes or audio == ""):
        raise ManifestError(f"{where}: no `speaker_audio` beside the other keys of the speaker; give its path")
    return Speaker(AudioRef(os.path.normpath(folder / audio)), text or "", codes) if audio else None


def _codes(row: Mapping[str, Any], key: str, where: str) -> Codes:
    frames = typed(row, key, list, where) or []
    for frame in frames:
        if not isinstance(frame, list) or not frame or not all(type(code) is int and code >= 0 for code in frame):
            raise ManifestError(f"{where}: `{key}` holds {frame!r}; it must be a list of codes (0 or more) per frame")
    if len({len(frame) for frame in frames}) > 1:
        raise ManifestError(f"{where}: the frames of `{key}` differ in length")
    return tuple(tuple(frame) for frame in frames)


def typed(row: Mapping[str, Any], key: str, kind: type | tuple[type, ...], where: str) -> Any:
    """row[key]; None where it is missing or null. Raises ManifestError for another type."""
    value = row.get(key)
    if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
        names = " or ".join(one.__name__ for one in (kind if isinstance(kind, tuple) else (kind,)))
        raise ManifestError(f"{where}: `{key}` is {value!r} ({type(value).__name__}); it must be {names}")
    return value


def _text(row: Mapping[str, Any], key: str, where: str) -> str | None:
    """A text that a manifest gives; NUL, which files and tokenizers take for an end, is refused."""
    value: str | None = typed(row, key, str, where)
    if value is not None and "\0" in value:
        raise ManifestError(f"{where}: `{key}` is {value!r}; it holds '\\x00', which is no text")
    return value


def _keywords(row: Mapping[str, Any], where: str) -> tuple[str, ...]:
    keywords = typed(row, "keywords", list, where) or []
    if not all(isinstance(word, str) and word.strip() for word in keywords):
        raise ManifestError(f"{where}: `keywords` is {keywords!r}; it must be a list of words, none empty")
    return tuple(keywords)


def read_duration_s(row: Mapping[str, Any], where: str) -> float | None:
    """Seconds of `duration_s`, or of `duration`. Raises ManifestError for what is not a finite number above 0."""
    key = "duration_s" if row.get("duration_s") is not None else "duration"
    value = typed(row, key, (float, int), where)
    if value is not None and not (math.isfinite(value) and value > 0):
        raise ManifestError(f"{where}: `{key}` is {value}; it must be seconds above 0, or left out")
    return None if value is None else float(value)


def _refuse_duplicates(utterances: Sequence[Utterance]) -> None:
    first: dict[str, str] = {}
    for utterance in utterances:
        before = first.setdefault(utterance.id, utterance.where)
        if before is not utterance.where:
            raise ManifestError(
                f"{utterance.where}: id {utterance.id!r} stands already at {before}; ids must differ (without an `id`, "
                "<file name>:<line> is used)"
            )
