#!/usr/bin/env python3
"""Common Voice (commonvoice.mozilla.org), one language -> manifests: train, dev, test.

    python data/prepare_commonvoice.py CORPUS/cv-corpus-17.0-2024-03-15/zh-CN --out data/commonvoice_zh

Layout: clips/*.mp3 and {train,dev,test,validated,other,...}.tsv with the columns client_id, path, sentence and, but for
the first releases, locale. clip_durations.tsv (clip, milliseconds), where it is there, saves reading the headers.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from speechrl.data.corpus import CorpusError, LeftOut, Reader, choose, corpus_parser, expect, language_of, recorded, run
from speechrl.types import Utterance

COLUMNS = ("client_id", "path", "sentence")
KEPT = ("accents", "age", "gender")


def rows_of(path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """("file:line", row). Sentences hold quotation marks of all kinds, which mean nothing to the format."""
    with open(path, encoding="utf-8", newline="") as stream:
        reader = csv.DictReader(stream, delimiter="\t", quoting=csv.QUOTE_NONE)
        for row in reader:
            yield f"{path}:{reader.line_num}", row


def durations_s(folder: Path) -> dict[str, float]:
    """{clip: seconds} of clip_durations.tsv; empty without it."""
    path = folder / "clip_durations.tsv"
    if not path.exists():
        return {}
    return {row["clip"]: int(row["duration[ms]"]) / 1000 for _, row in rows_of(path)}


def read(folder: Path, split: str, left_out: LeftOut) -> Iterator[Utterance]:
    """The utterances of one split, in the order of its table."""
    known_s = durations_s(folder)
    for where, row in rows_of(folder / f"{split}.tsv"):
        missing = [name for name in COLUMNS if not row.get(name)]
        if missing == ["sentence"]:
            left_out["without a sentence"] += 1
            continue
        if missing:
            raise CorpusError(f"{where}: no {missing[0]} (columns: {', '.join(row)})")
        clip = row["path"] if row["path"].endswith(".mp3") else f"{row['path']}.mp3"  # the first releases left it out
        yield Utterance(
            id=Path(clip).stem,
            text=row["sentence"].strip(),
            audio=recorded(folder / "clips" / clip),
            language=language_of(row.get("locale") or folder.resolve().name),
            duration_s=known_s.get(clip) or None,
            metadata={"speaker": row["client_id"], **{name: row[name] for name in KEPT if row.get(name)}},
            where=where,
        )


def splits(arguments: argparse.Namespace) -> dict[str, Reader]:
    folder = arguments.corpus
    expect(folder, ["clips"], "the folder of one language of Common Voice (cv-corpus-.../LANGUAGE)")
    there = sorted(path.stem for path in folder.glob("*.tsv"))
    return {split: partial(read, folder, split) for split in choose(arguments.splits, there, "--splits")}


def main(argv: Sequence[str] | None = None) -> None:
    assert __doc__
    parser = corpus_parser(__doc__)
    parser.add_argument("--splits", nargs="+", default=("train", "dev", "test"), help="names of .tsv files")
    arguments = parser.parse_args(argv)
    run(arguments, lambda: splits(arguments))


if __name__ == "__main__":
    main()
