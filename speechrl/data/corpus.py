"""What the scripts in data/ share: a corpus on disk, in the layout that it ships in -> one manifest per split."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import ijson

from speechrl.data.audio import AudioError, duration_s_of
from speechrl.data.languages import LANGUAGES, language_code
from speechrl.data.manifest import row_of, write_manifest
from speechrl.types import AudioRef, Utterance

CHUNK = 4096  # utterances whose headers are read at a time
THREADS = 8  # reading headers is waiting for the disk

LeftOut = Counter[str]  # reason -> utterances
Reader = Callable[[LeftOut], Iterator[Utterance]]  # of one split; counts what it leaves out


class CorpusError(ValueError):
    """A folder that is not what a script reads. The message says what was expected where."""


@dataclass
class Summary:
    """What came of one split."""

    utterances: int = 0
    seconds: float = 0.0
    characters: int = 0
    speakers: set[str] = field(default_factory=set)
    left_out: LeftOut = field(default_factory=Counter)

    def add(self, utterance: Utterance) -> None:
        self.utterances += 1
        self.seconds += utterance.duration_s or 0.0
        self.characters += len(utterance.text)
        if "speaker" in utterance.metadata:
            self.speakers.add(str(utterance.metadata["speaker"]))

    def __str__(self) -> str:
        parts = [f"{self.utterances:,} utterances", f"{self.seconds / 3600:,.2f} h"]
        parts += [f"{len(self.speakers):,} speakers"] if self.speakers else []
        parts += [f"{self.characters:,} characters"]
        parts += [f"left out: {count:,} {reason}" for reason, count in sorted(self.left_out.items())]
        return ", ".join(parts)


def corpus_parser(doc: str) -> argparse.ArgumentParser:
    """The arguments that all scripts take. doc: the script's docstring, whose first paragraph --help shows."""
    parser = argparse.ArgumentParser(description=doc.split("\n\n")[0])
    parser.add_argument("corpus", type=Path, help="folder of the corpus, as it was unpacked")
    parser.add_argument("--out", type=Path, required=True, help="folder for SPLIT.jsonl of each split")
    parser.add_argument(
        "--on_error", choices=("stop", "skip"), default="stop", help="missing audio stops, or is left out and counted"
    )
    return parser


def run(arguments: argparse.Namespace, splits: Callable[[], Mapping[str, Reader]]) -> None:
    """Write the manifests of all splits and print their counts. Exits with the message (code 2) on a wrong corpus."""
    try:
        for name, reader in splits().items():
            path = arguments.out / f"{name}.jsonl"
            print(f"{path}: {prepare(path, reader, arguments.on_error == 'skip')}", flush=True)
    except (ValueError, OSError) as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def prepare(path: Path, reader: Reader, skip: bool) -> Summary:
    """Write one split's manifest, in one move. Durations that the corpus does not tell are read from the headers.

    skip: leave utterances without usable audio out. Raises CorpusError for a split without utterances or an id that
    stands twice, AudioError for audio that is missing.
    """
    summary = Summary()
    known: set[str] = set()

    def rows() -> Iterator[dict]:
        utterances = reader(summary.left_out)
        with ThreadPoolExecutor(THREADS) as pool:
            while chunk := list(islice(utterances, CHUNK)):
                for utterance in pool.map(lambda one: _measured(one, skip), chunk):
                    if utterance is None:
                        summary.left_out["without usable audio"] += 1
                        continue
                    if utterance.id in known:
                        raise CorpusError(f"{utterance.where}: id {utterance.id!r} stands twice")
                    known.add(utterance.id)
                    summary.add(utterance)
                    yield row_of(utterance, path.parent)
        if not summary.utterances:
            raise CorpusError(f"{path.stem}: no utterance is left ({summary})")

    write_manifest(path, rows())
    return summary


def _measured(utterance: Utterance, skip: bool) -> Utterance | None:
    """With its duration; None if it is to be left out."""
    audio, where = utterance.audio, f"{utterance.where}: utterance {utterance.id}"
    assert audio is not None
    try:
        if utterance.duration_s is None:
            utterance = replace(utterance, duration_s=round(duration_s_of(audio, where), 4))
        elif not os.path.exists(audio.path):
            raise AudioError(f"{where}: {audio.path}: no such file")
        if not utterance.duration_s or utterance.duration_s <= 0:
            raise AudioError(f"{where}: {audio} lasts {utterance.duration_s} s")
    except AudioError as error:
        if skip:
            return None
        raise AudioError(f"{error}; --on_error skip leaves such utterances out") from error
    return utterance


# --- layouts --------------------------------------------------------------------------------------------------------


def expect(folder: Path, names: Sequence[str], corpus: str) -> None:
    """Raises CorpusError unless the folder is there and all of the names lie in it; it says what lies there instead."""
    if not folder.is_dir():
        raise CorpusError(f"{folder}: no such folder; give the one that {corpus} was unpacked into")
    missing = [name for name in names if not (folder / name).exists()]
    if not missing:
        return
    there = sorted(path.name for path in folder.iterdir())
    shown = ", ".join(there[:8]) + (f" and {len(there) - 8} more" if len(there) > 8 else "") if there else "nothing"
    raise CorpusError(f"{folder}: not {corpus}: expected {', '.join(missing)} in it, found {shown}")


def text_lines(path: Path) -> Iterator[tuple[str, str]]:
    """("file:line", line) of the lines of a UTF-8 file that hold something. Raises CorpusError for other encodings."""
    try:
        content = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CorpusError(f"{path}: not UTF-8 ({error})") from error
    for number, line in enumerate(content.split("\n"), start=1):
        if line.strip():
            yield f"{path}:{number}", line.rstrip("\r")


def table(path: Path) -> dict[str, tuple[str, str]]:
    """{key: ("file:line", rest of the line)} of a file whose lines are a key, white space and a value (Kaldi's form; a
    value may be empty). Raises CorpusError for a key that stands twice.
    """
    found: dict[str, tuple[str, str]] = {}
    for where, line in text_lines(path):
        key, *value = line.split(maxsplit=1)
        if key in found:
            raise CorpusError(f"{where}: {key} stands already at {found[key][0]}")
        found[key] = (where, value[0].strip() if value else "")
    return found


def scp_path(value: str, root: Path, where: str) -> Path:
    """The sound file that a line of wav.scp names. Raises CorpusError for a command or a place in an archive."""
    if value.endswith("|") or value.startswith("|") or value == "-":
        raise CorpusError(
            f"{where}: {value!r} is a command, which is not run here; write its output to a file (flac or wav) and "
            "name that"
        )
    if re.search(r"\.ark:\d+$", value):
        raise CorpusError(f"{where}: {value!r} lies in a Kaldi archive; copy it to a file (wav-copy) and name that")
    if not value:
        raise CorpusError(f"{where}: no path")
    return root / value


def index_segments(path: Path, keys: Sequence[str]) -> Iterator[tuple[dict, dict]]:
    """(recording, segment) of a JSON index of long recordings: {"audios": [{"path", "aid", "segments": [...]}]}.

    It may have gigabytes, so it is never in memory as a whole. keys: what each segment has. Raises CorpusError.
    """
    with open(path, "rb") as stream:
        try:
            for audio in ijson.items(stream, "audios.item", use_float=True):
                for segment in audio["segments"]:
                    missing = [key for key in keys if key not in segment]
                    if missing or "path" not in audio or "aid" not in audio:
                        raise CorpusError(
                            f"{path}: a segment without {missing or 'a recording'}: {segment}; not the index expected"
                        )
                    yield audio, segment
        except (ijson.JSONError, KeyError, TypeError) as error:
            raise CorpusError(f"{path}: not an index of recordings ({error!r})") from error


def language_of(name: str) -> str:
    """The English name of a language that a corpus writes as a code ("zh-CN", "cmn_hans_cn") or in lower case."""
    return LANGUAGES.get(language_code(name), name)


def without_spaces(text: str) -> str:
    """Of a transcript whose words were separated by hand, in a language that writes none."""
    return "".join(text.split())


def recorded(path: Path, start_s: float | None = None, end_s: float | None = None) -> AudioRef:
    """A whole sound file, or what lies in it between two times."""
    name = os.path.abspath(path)
    if start_s is None or end_s is None:
        return AudioRef(name)
    return AudioRef(name, None, start_s, round(end_s - start_s, 4))


def choose(wanted: Sequence[str], there: Iterable[str], what: str) -> list[str]:
    """The wanted names, or all that are there. Raises CorpusError for one that is not."""
    names = list(there)
    unknown = [name for name in wanted if name not in names]
    if unknown:
        raise CorpusError(f"{what} {unknown[0]}: there are {', '.join(names) or 'none'}")
    return list(wanted) or names
