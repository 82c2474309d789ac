#!/usr/bin/env python3
"""An audio dataset of Hugging Face's `datasets` -> a manifest of each split, whose lines name rows of it.

    python data/prepare_datasets.py my_dataset --out data/mine --text_column sentence --language German

Takes a folder that save_to_disk wrote, or any folder that load_dataset reads from disk (Parquet files as hubs ship
them, an audiofolder with metadata). The latter, and a dataset whose audio column is not called `audio`, is saved as
OUT/SPLIT.dataset. A folder with the columns `audio` and `text` needs no preparation: it is a manifest as it is.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import datasets

from speechrl.data.corpus import CorpusError, LeftOut, Reader, choose, corpus_parser, expect, language_of, run
from speechrl.types import AudioRef, Utterance


def load(folder: Path) -> tuple[datasets.DatasetDict, bool]:
    """(splits, are they saved there as they are?). One split without a name is called "all"."""
    expect(folder, [], "a dataset")
    try:
        loaded = datasets.load_from_disk(str(folder))
    except (FileNotFoundError, ValueError):
        try:
            return datasets.load_dataset(str(folder)), False
        except (ValueError, FileNotFoundError, datasets.exceptions.DatasetGenerationError) as error:
            raise CorpusError(f"{folder}: neither load_from_disk nor load_dataset can read it ({error})") from error
    if isinstance(loaded, datasets.DatasetDict):
        return loaded, True
    return datasets.DatasetDict({"all": loaded}), True


def read(dataset: datasets.Dataset, place: Path, options: argparse.Namespace, left_out: LeftOut) -> Iterator[Utterance]:
    """The rows; place: where the dataset lies, or will be saved."""
    source = options.corpus.resolve()
    columns = dataset.column_names
    for name in (options.audio_column, options.text_column, *([options.id_column] if options.id_column else ())):
        if name not in columns:
            raise CorpusError(f"{place}: no column {name!r}; there are {', '.join(columns)}")
    if not isinstance(dataset.features[options.audio_column], datasets.Audio):
        raise CorpusError(
            f"{place}: column {options.audio_column!r} is {dataset.features[options.audio_column]}, no Audio"
        )
    if place != source and source not in place.parents:
        if place.exists():
            raise CorpusError(f"{place} is there already: remove it, or give another --out")
        renamed = dataset if options.audio_column == "audio" else dataset.rename_column(options.audio_column, "audio")
        renamed.save_to_disk(str(place))
    for index, row in enumerate(dataset.remove_columns(options.audio_column)):
        text, language = row[options.text_column], row.get("language") or options.language
        if text is None:
            left_out["without text"] += 1
            continue
        yield Utterance(
            id=str(row[options.id_column]) if options.id_column else f"{place.stem}:{index}",
            text=text.strip(),
            audio=AudioRef(str(place), index),
            language=language_of(language) if isinstance(language, str) and language else None,
            metadata={key: row[key] for key in options.keep if key in columns},
            where=f"{place}:{index}",
        )


def splits(arguments: argparse.Namespace) -> dict[str, Reader]:
    found, saved = load(arguments.corpus)
    there = arguments.corpus.resolve()
    readers: dict[str, Reader] = {}
    for split in choose(arguments.splits, found, "--splits"):
        in_place = saved and arguments.audio_column == "audio"
        place = (
            (there if split == "all" else there / split) if in_place else arguments.out.resolve() / f"{split}.dataset"
        )
        readers[split] = partial(read, found[split], place, arguments)
    return readers


def main(argv: Sequence[str] | None = None) -> None:
    assert __doc__
    parser = corpus_parser(__doc__)
    parser.add_argument("--splits", nargs="+", default=(), help="all that are there if not given")
    parser.add_argument("--audio_column", default="audio")
    parser.add_argument("--text_column", default="text")
    parser.add_argument("--id_column", default="", help="SPLIT:ROW if not given")
    parser.add_argument("--keep", nargs="*", default=("speaker",), help="columns to keep as metadata")
    parser.add_argument("--language", default="", help="of rows without a `language`")
    arguments = parser.parse_args(argv)
    run(arguments, lambda: splits(arguments))


if __name__ == "__main__":
    main()
