#!/usr/bin/env python3
"""WenetSpeech (openslr.org/121) -> manifests: train, dev, test_net, test_meeting.

    python data/prepare_wenetspeech.py CORPUS/WenetSpeech --out data/wenetspeech --subset S

Layout: WenetSpeech.json and audio/{train,dev,test_net,test_meeting}/... in Opus. An entry of "audios" has "path", and
"segments" with "sid", "begin_time", "end_time" (seconds), "text", "confidence" and "subsets" (of L, M, S, W, DEV,
TEST_NET, TEST_MEETING). Recordings stay whole: manifests name segments by `offset_s` and `duration_s`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from speechrl.data.corpus import LeftOut, Reader, corpus_parser, expect, index_segments, recorded, run
from speechrl.types import Utterance

INDEX = "WenetSpeech.json"


def read(folder: Path, subset: str, min_confidence: float, left_out: LeftOut) -> Iterator[Utterance]:
    """The segments of one subset, recording after recording."""
    for audio, segment in index_segments(folder / INDEX, ("sid", "begin_time", "end_time", "text", "subsets")):
        if subset not in segment["subsets"]:
            continue
        text = segment["text"].strip()
        if not text:
            left_out["without text"] += 1
            continue
        if segment.get("confidence", 1.0) < min_confidence:
            left_out["below --min_confidence"] += 1
            continue
        ref = recorded(folder / audio["path"], float(segment["begin_time"]), float(segment["end_time"]))
        yield Utterance(
            id=segment["sid"],
            text=text,
            audio=ref,
            language="Chinese",
            duration_s=ref.length_s,
            metadata={"recording": audio["aid"], "source": audio.get("source", "")},
            where=f"{folder / INDEX}: {segment['sid']}",
        )


def splits(arguments: argparse.Namespace) -> dict[str, Reader]:
    expect(arguments.corpus, [INDEX, "audio"], "WenetSpeech")
    subsets = {"train": arguments.subset, "dev": "DEV", "test_net": "TEST_NET", "test_meeting": "TEST_MEETING"}
    return {
        split: partial(read, arguments.corpus, subsets[split], arguments.min_confidence * (split == "train"))
        for split in arguments.splits
    }


def main(argv: Sequence[str] | None = None) -> None:
    names = ("train", "dev", "test_net", "test_meeting")
    assert __doc__
    parser = corpus_parser(__doc__)
    parser.add_argument("--splits", nargs="+", choices=names, default=names)
    parser.add_argument(
        "--subset",
        choices=("L", "M", "S", "W"),
        default="S",
        help="of train: 10000, 1000, 100 hours; W weakly labelled",
    )
    parser.add_argument("--min_confidence", type=float, default=0.0, help="leave out training segments below")
    arguments = parser.parse_args(argv)
    run(arguments, lambda: splits(arguments))


if __name__ == "__main__":
    main()
