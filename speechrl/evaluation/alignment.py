"""Reference and hypothesis side by side, as text for people: the worst utterances first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path

from rapidfuzz.distance import Levenshtein
from rich.cells import cell_len

from speechrl.data.normalise import words
from speechrl.evaluation.metrics import Decoded, Samples
from speechrl.reward.metrics import ErrorCounts

WIDTH = 110  # columns of a line
MARKS = {"equal": "", "replace": "S", "delete": "D", "insert": "I"}


def write_alignment(path: Path, groups: Sequence[Samples]) -> None:
    """Every utterance's first sample against its reference, most character errors first; equal ones in their order."""
    items = sorted((samples[0] for samples in groups), key=lambda item: -item.chars.errors)
    path.write_text("\n".join(line for item in items for line in [*lines_of(item), ""]), encoding="utf-8")


def lines_of(item: Decoded) -> list[str]:
    """The utterance's id and counts, then REF, HYP and a line of S, D and I under the words that differ."""
    utterance = item.utterance
    facts = [_told("characters", item.chars), _told("words", item.words)]
    if utterance.language:
        facts.append(utterance.language)
    if utterance.duration_s is not None:
        facts.append(f"{utterance.duration_s:.2f} s")
    lines = [f"{utterance.id}  {', '.join(facts)}"]
    reference, hypothesis = (words(text, utterance.language) for text in (utterance.text, item.text))
    for columns in _blocks(_columns(reference, hypothesis)):
        for name, cells in zip(("REF", "HYP", "   "), zip(*columns, strict=True), strict=True):
            widths = [max(map(cell_len, column)) for column in columns]
            padded = [cell + " " * (width - cell_len(cell)) for cell, width in zip(cells, widths, strict=True)]
            lines.append(f"  {name} {' '.join(padded)}".rstrip())
    return [line for line in lines if line.strip()]


def _told(unit: str, counts: ErrorCounts) -> str:
    edits = f"S {counts.substitutions} D {counts.deletions} I {counts.insertions}"
    return f"{counts.errors} of {counts.reference_length} {unit} ({edits})"


def _columns(reference: Sequence[str], hypothesis: Sequence[str]) -> list[tuple[str, str, str]]:
    """(reference word, hypothesis word, mark) of a shortest alignment; * stands where one side has nothing."""
    columns = []
    for run in Levenshtein.opcodes(reference, hypothesis):
        pairs = zip_longest(
            reference[run.src_start : run.src_end], hypothesis[run.dest_start : run.dest_end], fillvalue="*"
        )
        columns += [(ref, hyp, MARKS[run.tag]) for ref, hyp in pairs]
    return columns


def _blocks(columns: Sequence[tuple[str, str, str]]) -> Iterator[list[tuple[str, str, str]]]:
    """Runs of columns that fit into WIDTH."""
    block: list[tuple[str, str, str]] = []
    taken = 0
    for column in columns:
        width = max(map(cell_len, column)) + 1
        if block and taken + width > WIDTH:
            yield block
            block, taken = [], 0
        block.append(column)
        taken += width
    if block:
        yield block
