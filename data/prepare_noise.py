#!/usr/bin/env python3
"""A folder of noise recordings (MUSAN's noise/, say) -> a manifest of clips in which nobody says anything.

    python data/prepare_noise.py CORPUS/musan/noise --out data/musan

Every sound file below the folder is divided into clips of --seconds; their reference is "". A robust recogniser is
trained with about a tenth of them (rewards/asr_robust.py). Recordings stay whole: the manifest names parts of them.
Don't give it recordings of speech, or of music with words.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from speechrl.data.audio import duration_s_of
from speechrl.data.augment import SUFFIXES
from speechrl.data.corpus import CorpusError, LeftOut, Reader, corpus_parser, expect, recorded, run
from speechrl.types import AudioRef, Utterance

SHORTEST_S = 0.5


def read(folder: Path, seconds: float, left_out: LeftOut) -> Iterator[Utterance]:
    """The clips of all recordings, by path."""
    for path in sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES):
        whole_s = duration_s_of(AudioRef(str(path)))
        starts = [index * seconds for index in range(int(whole_s // seconds) + 1)]
        for start_s in starts:
            end_s = min(start_s + seconds, whole_s)
            if end_s - start_s < min(SHORTEST_S, seconds):
                left_out[f"ends below {SHORTEST_S} s"] += 1
                continue
            audio = recorded(path, start_s, end_s)
            name = path.relative_to(folder).with_suffix("").as_posix()
            yield Utterance(id=f"{name}-{start_s:g}", text="", audio=audio, duration_s=audio.length_s, where=str(path))


def splits(arguments: argparse.Namespace) -> dict[str, Reader]:
    expect(arguments.corpus, [], "noise recordings")
    if arguments.seconds <= 0:
        raise CorpusError(f"--seconds {arguments.seconds}: it must be above 0")
    return {"noise": partial(read, arguments.corpus, arguments.seconds)}


def main(argv: Sequence[str] | None = None) -> None:
    assert __doc__
    parser = corpus_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=6.0, help="length of a clip")
    arguments = parser.parse_args(argv)
    run(arguments, lambda: splits(arguments))


if __name__ == "__main__":
    main()
