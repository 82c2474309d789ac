#!/usr/bin/env python3
"""KeSpeech (github.com/KeSpeech/KeSpeech) -> manifests: train_phase1, train_phase2, dev_phase1, dev_phase2, test.

    python data/prepare_kespeech.py CORPUS/KeSpeech --out data/kespeech

Layout: Tasks/ASR/SPLIT/{wav.scp,text,utt2spk,utt2subdialect} in Kaldi's form, with paths relative to the corpus
(Audio/SPEAKER/PHASE/UTTERANCE.wav). <SPOKEN_NOISE> is taken out of the texts; what was nothing else is left out and
counted. The subdialect is kept as metadata, for --eval.group_by subdialect.
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
    recorded,
    run,
    scp_path,
    table,
    without_spaces,
)
from speechrl.types import Utterance

SPLITS = ("train_phase1", "train_phase2", "dev_phase1", "dev_phase2", "test")
TABLES = ("wav.scp", "text", "utt2spk", "utt2subdialect")
NOISE = "<SPOKEN_NOISE>"


def read(corpus: Path, split: str, left_out: LeftOut) -> Iterator[Utterance]:
    """The utterances of one split, in the order of its `text`."""
    folder = corpus / "Tasks" / "ASR" / split
    sounds, texts, speakers, dialects = (table(folder / name) for name in TABLES)
    for name, (where, text) in texts.items():
        spoken = without_spaces(text.replace(NOISE, ""))
        if not spoken:
            left_out["without speech"] += 1
            continue
        missing = [
            key for key, rows in zip(TABLES, (sounds, texts, speakers, dialects), strict=True) if name not in rows
        ]
        if missing:
            raise CorpusError(f"{where}: {name} is not in {missing[0]}")
        yield Utterance(
            id=name,
            text=spoken,
            audio=recorded(scp_path(sounds[name][1], corpus, sounds[name][0])),
            language="Chinese",
            metadata={"speaker": speakers[name][1], "subdialect": dialects[name][1]},
            where=where,
        )


def splits(arguments: argparse.Namespace) -> dict[str, Reader]:
    needed = ["Audio", *(f"Tasks/ASR/{split}/{name}" for split in arguments.splits for name in TABLES)]
    expect(arguments.corpus, needed, "KeSpeech")
    return {split: partial(read, arguments.corpus, split) for split in arguments.splits}


def main(argv: Sequence[str] | None = None) -> None:
    assert __doc__
    parser = corpus_parser(__doc__)
    parser.add_argument("--splits", nargs="+", choices=SPLITS, default=SPLITS)
    arguments = parser.parse_args(argv)
    run(arguments, lambda: splits(arguments))


if __name__ == "__main__":
    main()
