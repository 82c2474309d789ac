#!/usr/bin/env python3
"""lhotse cuts (JSONL, also .gz) -> one manifest, an utterance per supervision.

    python data/prepare_lhotse.py cuts_train.jsonl.gz --out data/mine

Reads of each MonoCut "start", "recording" ("sources" of type "file", "duration") and of each of its "supervisions"
"id", "start" (from the cut's start), "duration", "text", and if there "language" and "speaker". Recordings stay whole:
manifests name segments by `offset_s` and `duration_s`. Mixed and padded cuts, features without recordings, changed
recordings (speed, volume), recordings of several channels and sources that are no files are refused. Relative paths
are taken from the folder that you stand in, as lhotse does; --audio_root changes that.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from speechrl.data.corpus import CorpusError, LeftOut, Reader, corpus_parser, language_of, recorded, run
from speechrl.data.manifest import read_rows
from speechrl.types import AudioRef, Utterance

SAME_S = 1e-3  # a supervision that covers its recording but for so much is the whole of it


def read(options: argparse.Namespace, left_out: LeftOut) -> Iterator[Utterance]:
    """The supervisions, cut after cut."""
    for where, _, cut in read_rows(options.corpus):
        try:
            recording = _recording(cut, where)
            if not cut["supervisions"]:
                left_out["cuts without a supervision"] += 1
            for supervision in cut["supervisions"]:
                if supervision.get("text") is None:
                    left_out["without text"] += 1
                    continue
                yield _utterance(cut, supervision, recording, options, where)
        except (KeyError, TypeError) as error:
            raise CorpusError(f"{where}: not a cut of lhotse ({error!r})") from error


def _recording(cut: dict[str, Any], where: str) -> dict[str, Any]:
    """Raises CorpusError for a cut that is not a plain part of one sound file."""
    kind, recording = cut.get("type"), cut.get("recording")
    if kind != "MonoCut":
        raise CorpusError(f"{where}: a cut of type {kind!r}; MonoCut is read (save others with save_audios first)")
    if recording is None:
        raise CorpusError(f"{where}: the cut has features, but no recording")
    sources = recording["sources"]
    if recording.get("transforms"):
        raise CorpusError(f"{where}: the recording is changed on the fly ({recording['transforms']}); save it first")
    if len(sources) != 1 or sources[0]["type"] != "file":
        raise CorpusError(f"{where}: sources {[source['type'] for source in sources]}; one of type 'file' is read")
    if len(sources[0]["channels"]) != 1:
        raise CorpusError(
            f"{where}: channels {sources[0]['channels']}; write the one that is meant to a file of its own"
        )
    return recording


def _utterance(
    cut: dict[str, Any], supervision: dict[str, Any], recording: dict[str, Any], options: argparse.Namespace, where: str
) -> Utterance:
    path = options.audio_root / recording["sources"][0]["source"]
    start_s = round(cut["start"] + supervision["start"], 6)
    length_s, whole_s = supervision["duration"], recording["duration"]
    whole = abs(start_s) < SAME_S and abs(length_s - whole_s) < SAME_S
    if not whole and start_s < 0:
        raise CorpusError(f"{where}: supervision {supervision['id']} starts before its recording")
    audio: AudioRef = recorded(path) if whole else recorded(path, start_s, start_s + length_s)
    language = supervision.get("language") or options.language
    return Utterance(
        id=supervision["id"],
        text=supervision["text"].strip(),
        audio=audio,
        language=language_of(language) if language else None,
        duration_s=audio.length_s or whole_s,
        metadata={"speaker": supervision["speaker"]} if supervision.get("speaker") else {},
        where=where,
    )


def splits(arguments: argparse.Namespace) -> dict[str, Reader]:
    name = arguments.corpus.name.removesuffix(".gz")
    if not arguments.corpus.is_file() or not name.endswith(".jsonl"):
        raise CorpusError(f"{arguments.corpus}: expected a file of lhotse cuts, .jsonl or .jsonl.gz")
    return {name.removesuffix(".jsonl"): partial(read, arguments)}


def main(argv: Sequence[str] | None = None) -> None:
    assert __doc__
    parser = corpus_parser(__doc__)
    parser.add_argument("--language", default="", help="of supervisions that tell none")
    parser.add_argument("--audio_root", type=Path, default=Path(), help="folder that relative paths start at")
    arguments = parser.parse_args(argv)
    run(arguments, lambda: splits(arguments))


if __name__ == "__main__":
    main()
