#!/usr/bin/env python3
"""A Kaldi data directory -> one manifest, named like the directory.

    python data/prepare_kaldi.py kaldi/data/train_si84 --out data/wsj --language English

Reads wav.scp, text, and where they are there segments, utt2spk and utt2lang. With segments recordings stay whole:
manifests name segments by `offset_s` and `duration_s`. Commands (pipes) and places in archives are refused. Relative
paths are taken from the folder that you stand in, as Kaldi does; --audio_root changes that.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from speechrl.data.audio import duration_s_of
from speechrl.data.corpus import (
    CorpusError,
    LeftOut,
    Reader,
    corpus_parser,
    expect,
    language_of,
    recorded,
    run,
    scp_path,
    table,
)
from speechrl.types import AudioRef, Utterance


def read(folder: Path, options: argparse.Namespace, left_out: LeftOut) -> Iterator[Utterance]:
    """The utterances in the order of `text`."""
    tables = {
        name: table(folder / name)
        for name in ("wav.scp", "text", "segments", "utt2spk", "utt2lang")
        if (folder / name).exists()
    }
    speakers, languages = tables.get("utt2spk", {}), tables.get("utt2lang", {})
    for name, (where, text) in tables["text"].items():
        if name not in tables.get("segments", tables["wav.scp"]):
            left_out["with text, but without audio"] += 1
            continue
        audio = _audio(name, tables, options.audio_root)
        language = languages[name][1] if name in languages else options.language
        yield Utterance(
            id=name,
            text="".join(text.split()) if options.join else text,
            audio=audio,
            language=language_of(language) if language else None,
            duration_s=audio.length_s,
            metadata={"speaker": speakers[name][1]} if name in speakers else {},
            where=where,
        )


def _audio(name: str, tables: dict[str, dict[str, tuple[str, str]]], root: Path) -> AudioRef:
    recording, start_s, end_s = name, None, None
    if "segments" in tables:
        where, value = tables["segments"][name]
        try:
            recording, start, end = value.split()[:3]
            start_s, end_s = float(start), float(end)
        except ValueError:
            raise CorpusError(f"{where}: expected UTTERANCE RECORDING START END, seconds") from None
        if recording not in tables["wav.scp"]:
            raise CorpusError(f"{where}: recording {recording} is not in wav.scp")
    where, value = tables["wav.scp"][recording]
    path = scp_path(value, root, where)
    if end_s == -1:  # Kaldi's way to say: to the end
        end_s = duration_s_of(AudioRef(str(path)), where)
    if start_s is not None and end_s is not None and not 0 <= start_s < end_s:
        raise CorpusError(f"{tables['segments'][name][0]}: the segment from {start_s} s to {end_s} s is empty")
    return recorded(path, start_s, end_s)


def splits(arguments: argparse.Namespace) -> dict[str, Reader]:
    expect(arguments.corpus, ["wav.scp", "text"], "a Kaldi data directory")
    return {arguments.corpus.resolve().name: partial(read, arguments.corpus, arguments)}


def main(argv: Sequence[str] | None = None) -> None:
    assert __doc__
    parser = corpus_parser(__doc__)
    parser.add_argument("--language", default="", help="of utterances without a line in utt2lang; none if not given")
    parser.add_argument(
        "--audio_root", type=Path, default=Path(), help="folder that relative paths in wav.scp start at"
    )
    parser.add_argument("--join", action="store_true", help="take the spaces out of texts (Chinese, cut into words)")
    arguments = parser.parse_args(argv)
    run(arguments, lambda: splits(arguments))


if __name__ == "__main__":
    main()
