#!/usr/bin/env python3
"""LibriSpeech (openslr.org/12) -> a manifest of each subset.

    python data/prepare_librispeech.py CORPUS/LibriSpeech --out data/librispeech --subsets train-clean-100 dev-clean

Layout: SUBSET/SPEAKER/CHAPTER/SPEAKER-CHAPTER-NUMBER.flac and SPEAKER-CHAPTER.trans.txt beside them. Transcripts are in
capitals without punctuation; --lowercase writes them in small letters.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from speechrl.data.corpus import CorpusError, LeftOut, Reader, choose, corpus_parser, expect, recorded, run, table
from speechrl.types import Utterance


def read(folder: Path, lowercase: bool, left_out: LeftOut) -> Iterator[Utterance]:
    """The utterances of one subset, by speaker, chapter and number."""
    for transcript in sorted(folder.glob("*/*/*.trans.txt")):
        for name, (where, text) in table(transcript).items():
            yield Utterance(
                id=name,
                text=text.lower() if lowercase else text,
                audio=recorded(transcript.parent / f"{name}.flac"),
                language="English",
                metadata={"speaker": name.split("-")[0], "subset": folder.name},
                where=where,
            )


def splits(arguments: argparse.Namespace) -> dict[str, Reader]:
    expect(arguments.corpus, [], "LibriSpeech")
    there = sorted({path.parents[2].name for path in arguments.corpus.glob("*/*/*/*.trans.txt")})
    if not there:
        raise CorpusError(
            f"{arguments.corpus}: not LibriSpeech: expected SUBSET/SPEAKER/CHAPTER/SPEAKER-CHAPTER.trans.txt in it, "
            "such as train-clean-100/103/1240/103-1240.trans.txt"
        )
    chosen = choose(arguments.subsets, there, "--subsets")
    return {subset: partial(read, arguments.corpus / subset, arguments.lowercase) for subset in chosen}


def main(argv: Sequence[str] | None = None) -> None:
    assert __doc__
    parser = corpus_parser(__doc__)
    parser.add_argument("--subsets", nargs="+", default=(), help="all that are there if not given")
    parser.add_argument("--lowercase", action="store_true", help="write texts in small letters")
    arguments = parser.parse_args(argv)
    run(arguments, lambda: splits(arguments))


if __name__ == "__main__":
    main()
