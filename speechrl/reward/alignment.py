"""Which unit of a hypothesis stands for which unit of its reference, and how that is written to an alignment file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rapidfuzz.distance import Levenshtein
from rich.cells import cell_len, set_cell_size

from speechrl.data.normalise import Rules
from speechrl.reward.metrics import UNITS, ErrorCounts, Measure

Op = Literal["hit", "substitution", "deletion", "insertion"]

_OPS: dict[str, Op] = {"equal": "hit", "replace": "substitution", "delete": "deletion", "insert": "insertion"}
_LETTERS: dict[Op, str] = {"hit": "", "substitution": "S", "deletion": "D", "insertion": "I"}
_NOTHING, _SPACE = "*", "␣"


@dataclass(frozen=True)
class AlignedPair:
    """One step of an alignment. reference is None for an insertion, hypothesis is None for a deletion."""

    op: Op
    reference: str | None
    hypothesis: str | None


@dataclass(frozen=True)
class Alignment:
    """Pairs in the order of the texts: their references are the reference's units, and so for the hypothesis."""

    pairs: tuple[AlignedPair, ...]

    @property
    def counts(self) -> ErrorCounts:
        found = Counter(pair.op for pair in self.pairs)
        substitutions, deletions, hits = found["substitution"], found["deletion"], found["hit"]
        return ErrorCounts(substitutions, deletions, found["insertion"], hits, substitutions + deletions + hits)


def align_units(reference: Sequence[str], hypothesis: Sequence[str]) -> Alignment:
    """An alignment with the fewest edits (Levenshtein 1966). Two empty sequences give no pairs."""
    pairs: list[AlignedPair] = []
    for op in Levenshtein.opcodes(reference, hypothesis):
        length = max(op.src_end - op.src_start, op.dest_end - op.dest_start)
        said: Sequence[str | None] = reference[op.src_start : op.src_end] or [None] * length
        heard: Sequence[str | None] = hypothesis[op.dest_start : op.dest_end] or [None] * length
        pairs += [AlignedPair(_OPS[op.tag], *pair) for pair in zip(said, heard, strict=True)]
    return Alignment(tuple(pairs))


def align(hyp: str, ref: str, rules: Rules = None, measure: Measure = "cer") -> Alignment:
    """The alignment behind a `cer`, `wer` or `mer`: its counts are those of that measure.

    Empty reference: insertions only. Empty hypothesis: deletions only. Both empty: no pairs.
    """
    return align_units(UNITS[measure](ref, rules), UNITS[measure](hyp, rules))


def alignment_lines(alignment: Alignment, width: int | None = None) -> list[str]:
    """Three lines, REF, HYP and OPS (S, D, I, blank for a hit), with a column a pair on a terminal.

    width: columns of a line; what doesn't fit goes on in three more. Chinese characters count as two columns. * stands
    for nothing, ␣ for a counted space. No pairs give bare labels.
    """
    lines = []
    for block in _blocks([_column(pair) for pair in alignment.pairs], width):
        rows = zip(("REF:", "HYP:", "OPS:"), *block, strict=True)
        lines += [" ".join(row).rstrip() for row in rows]
    return lines


def _column(pair: AlignedPair) -> tuple[str, ...]:
    """The three cells of a pair, equally wide."""
    cells = (_shown(pair.reference), _shown(pair.hypothesis), _LETTERS[pair.op])
    width = max(map(cell_len, cells))
    return tuple(set_cell_size(cell, width) for cell in cells)


def _blocks(columns: Sequence[tuple[str, ...]], width: int | None) -> list[list[tuple[str, ...]]]:
    """Runs of columns that fit into the width beside their labels; one run, an empty one, for no columns."""
    blocks: list[list[tuple[str, ...]]] = [[]]
    taken = label = len("REF:")
    for column in columns:
        needed = 1 + cell_len(column[0])
        if width is not None and blocks[-1] and taken + needed > width:
            blocks.append([])
            taken = label
        blocks[-1].append(column)
        taken += needed
    return blocks


def _shown(unit: str | None) -> str:
    return _NOTHING if unit is None else unit.replace(" ", _SPACE)
