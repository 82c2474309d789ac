#!/usr/bin/env python3
"""GigaSpeech (github.com/SpeechColab/GigaSpeech) -> manifests: train, dev, test.

    python data/prepare_gigaspeech.py CORPUS/GigaSpeech --out data/gigaspeech --subset S --lowercase

Layout: GigaSpeech.json and audio/{audiobook,podcast,youtube}/... in Opus. An entry of "audios" has "path", and
"segments" with "sid", "begin_time", "end_time" (seconds), "text_tn" and "subsets" (of {XL}, {L}, {M}, {S}, {XS},
{DEV}, {TEST}). Texts are in capitals with <COMMA>, <PERIOD>, <QUESTIONMARK> and <EXCLAMATIONPOINT>; segments of <SIL>,
<MUSIC>, <NOISE> or <OTHER> are left out and counted. Recordings stay whole: manifests name segments by `offset_s` and
`duration_s`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from speechrl.data.corpus import CorpusError, LeftOut, Reader, corpus_parser, expect, index_segments, recorded, run
from speechrl.types import Utterance

INDEX = "GigaSpeech.json"
MARKS = {"<COMMA>": ",", "<PERIOD>": ".", "<QUESTIONMARK>": "?", "<EXCLAMATIONPOINT>": "!"}
NO_SPEECH = {"<SIL>", "<MUSIC>", "<NOISE>", "<OTHER>"}


def plain_text(text_tn: str, punctuation: bool, lowercase: bool) -> str | None:
    """The words with real marks, or none; None for a segment that is not speech. Raises ValueError for another tag."""
    words: list[str] = []
    for token in text_tn.split():
        if token in NO_SPEECH:
            return None
        if token in MARKS:
            if punctuation and words:
                words[-1] += MARKS[token]
        elif re.fullmatch(r"<[A-Z]+>", token):
            raise ValueError(f"unknown tag {token} in {text_tn!r}")
        else:
            words.append(token.lower() if lowercase else token)
    return " ".join(words)


def read(folder: Path, subset: str, options: argparse.Namespace, left_out: LeftOut) -> Iterator[Utterance]:
    """The segments of one subset, recording after recording."""
    for audio, segment in index_segments(folder / INDEX, ("sid", "begin_time", "end_time", "text_tn", "subsets")):
        if f"{{{subset}}}" not in segment["subsets"]:
            continue
        where = f"{folder / INDEX}: {segment['sid']}"
        try:
            text = plain_text(segment["text_tn"], not options.no_punctuation, options.lowercase)
        except ValueError as error:
            raise CorpusError(f"{where}: {error}") from error
        if not text:
            left_out["without speech" if text is None else "without text"] += 1
            continue
        ref = recorded(folder / audio["path"], float(segment["begin_time"]), float(segment["end_time"]))
        yield Utterance(
            id=segment["sid"],
            text=text,
            audio=ref,
            language="English",
            duration_s=ref.length_s,
            metadata={"recording": audio["aid"], "source": audio.get("source", "")},
            where=where,
        )


def splits(arguments: argparse.Namespace) -> dict[str, Reader]:
    expect(arguments.corpus, [INDEX, "audio"], "GigaSpeech")
    subsets = {"train": arguments.subset, "dev": "DEV", "test": "TEST"}
    return {split: partial(read, arguments.corpus, subsets[split], arguments) for split in arguments.splits}


def main(argv: Sequence[str] | None = None) -> None:
    names = ("train", "dev", "test")
    assert __doc__
    parser = corpus_parser(__doc__)
    parser.add_argument("--splits", nargs="+", choices=names, default=names)
    parser.add_argument(
        "--subset", choices=("XL", "L", "M", "S", "XS"), default="S", help="of train: 10000, 2500, 1000, 250, 10 hours"
    )
    parser.add_argument("--no_punctuation", action="store_true", help="leave marks out of the texts")
    parser.add_argument("--lowercase", action="store_true", help="write texts in small letters")
    arguments = parser.parse_args(argv)
    run(arguments, lambda: splits(arguments))


if __name__ == "__main__":
    main()
