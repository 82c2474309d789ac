#!/usr/bin/env python3
"""Multilingual LibriSpeech (openslr.org/94), one language -> manifests: train, dev, test.

    python data/prepare_mls.py CORPUS/mls_german --out data/mls_german [--limited 9hr]

Layout: {train,dev,test}/transcripts.txt (utterance, tab, text) and {train,dev,test}/audio/SPEAKER/BOOK/UTTERANCE.flac
(.opus in mls_german_opus). --limited takes the training utterances that
train/limited_supervision/{9hr,1hr}/**/handles.txt lists.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from speechrl.data.corpus import (
    CorpusError,
    LeftOut,
    Reader,
    corpus_parser,
    expect,
    language_of,
    recorded,
    run,
    table,
    text_lines,
)
from speechrl.types import Utterance

SPLITS = ("train", "dev", "test")


def read(folder: Path, language: str, handles: set[str] | None, left_out: LeftOut) -> Iterator[Utterance]:
    """The utterances of one split, in the order of its transcripts. handles: those to take; None for all."""
    suffix = "opus" if next(folder.glob("audio/*/*/*.opus"), None) else "flac"
    for name, (where, text) in table(folder / "transcripts.txt").items():
        if handles is not None and name not in handles:
            left_out["outside --limited"] += 1
            continue
        speaker, _, rest = name.partition("_")
        book, underscore, _ = rest.partition("_")
        if not underscore:
            raise CorpusError(f"{where}: {name!r} is no SPEAKER_BOOK_NUMBER")
        yield Utterance(
            id=name,
            text=text,
            audio=recorded(folder / "audio" / speaker / book / f"{name}.{suffix}"),
            language=language,
            metadata={"speaker": speaker},
            where=where,
        )


def splits(arguments: argparse.Namespace) -> dict[str, Reader]:
    folder = arguments.corpus
    needed = [f"{split}/{name}" for split in arguments.splits for name in ("transcripts.txt", "audio")]
    expect(folder, needed, "a language of MLS")
    name = folder.resolve().name
    language = arguments.language or language_of(name.removeprefix("mls_").removesuffix("_opus"))
    if not arguments.language and not name.startswith("mls_"):
        raise CorpusError(f"{folder}: the folder's name tells no language (mls_german does); give --language")
    limited = {"train": _handles(folder, arguments.limited)} if arguments.limited else {}
    return {split: partial(read, folder / split, language, limited.get(split)) for split in arguments.splits}


def _handles(folder: Path, limit: str) -> set[str]:
    files = sorted((folder / "train" / "limited_supervision" / limit).rglob("handles.txt"))
    if not files:
        raise CorpusError(f"{folder}: expected train/limited_supervision/{limit}/handles.txt, or below it")
    return {line.strip() for file in files for _, line in text_lines(file)}


def main(argv: Sequence[str] | None = None) -> None:
    assert __doc__
    parser = corpus_parser(__doc__)
    parser.add_argument("--splits", nargs="+", choices=SPLITS, default=SPLITS)
    parser.add_argument("--language", default="", help="by default as the folder's name says")
    parser.add_argument("--limited", choices=("9hr", "1hr"), help="only the training utterances of this list")
    arguments = parser.parse_args(argv)
    run(arguments, lambda: splits(arguments))


if __name__ == "__main__":
    main()
