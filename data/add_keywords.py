#!/usr/bin/env python3
"""Hotword lists for a manifest: `keywords` from a word list, with distractors, and the same list as the `prompt`.

    python data/add_keywords.py data/mine/train.jsonl --words names.txt --out data/mine/train_hotwords.jsonl

The word list has a word or phrase a line. An utterance gets those that its reference holds, and --distractors others,
in random order: so the list alone does not tell what was said. One without any gets distractors alone, which teaches
not to put them in.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from speechrl.data.corpus import text_lines
from speechrl.data.manifest import read_manifest, row_of, write_manifest
from speechrl.data.normalise import words
from speechrl.reward.keywords import keyword_counts
from speechrl.types import Utterance


def spoken(utterance: Utterance, by_first: dict[str, list[str]]) -> list[str]:
    """The listed phrases that the reference holds, in the list's order. by_first: phrases by their first word."""
    text, language = utterance.text, utterance.language
    near = [phrase for word in dict.fromkeys(words(text, language)) for phrase in by_first.get(word, [])]
    return [phrase for phrase in near if keyword_counts(text, [phrase], text, language).hits]


def with_list(
    utterance: Utterance, listed: Sequence[str], found: Sequence[str], distractors: int, prompt: str
) -> Utterance:
    """The utterance with its hotwords; which distractors depends on its id alone."""
    seed = int.from_bytes(hashlib.blake2b(utterance.id.encode(), digest_size=8).digest(), "big")
    stream = np.random.default_rng(seed)
    others = [listed[place] for place in stream.permutation(len(listed)) if listed[place] not in found][:distractors]
    chosen = [*found, *others]
    keywords = tuple(chosen[place] for place in stream.permutation(len(chosen)))
    return replace(utterance, keywords=keywords, prompt=prompt.format(words=", ".join(keywords)))


def main(argv: Sequence[str] | None = None) -> None:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("manifest", type=Path)
    parser.add_argument("--words", type=Path, required=True, help="a word or phrase a line")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--distractors", type=int, default=20, help="listed words that the reference does not hold")
    parser.add_argument("--prompt", default="{words}", help="what the model is told; {words} stands for the list")
    arguments = parser.parse_args(argv)
    try:
        listed = list(dict.fromkeys(line.strip() for _, line in text_lines(arguments.words)))
        utterances = read_manifest(arguments.manifest)
    except (ValueError, OSError) as error:
        print(f"add_keywords.py: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    by_first: dict[str, list[str]] = {}
    for phrase in listed:
        if parts := words(phrase):
            by_first.setdefault(parts[0], []).append(phrase)
    spoken_in = [spoken(utterance, by_first) for utterance in utterances]
    rows = [
        with_list(utterance, listed, found, arguments.distractors, arguments.prompt)
        for utterance, found in zip(utterances, spoken_in, strict=True)
    ]
    write_manifest(arguments.out, (row_of(utterance, arguments.out.parent) for utterance in rows))
    held = sum(bool(found) for found in spoken_in)
    print(f"{arguments.out}: {len(rows):,} utterances, {held:,} with one of {len(listed):,} words in their reference")


if __name__ == "__main__":
    main()
