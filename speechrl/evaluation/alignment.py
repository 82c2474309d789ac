"""Reference and hypothesis side by side, as text for people: the worst utterances first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from speechrl.disk import write_lines
from speechrl.evaluation.metrics import Decoded, Samples
from speechrl.reward.alignment import align, alignment_lines
from speechrl.reward.metrics import ErrorCounts

WIDTH = 118  # columns of a line, without its indent


def write_alignment(path: Path, groups: Sequence[Samples]) -> None:
    """Every utterance's first sample against its reference, most character errors first; equal ones in their order."""
    items = sorted((samples[0] for samples in groups), key=lambda item: -item.chars.errors)
    write_lines(path, [line for item in items for line in ["", *lines_of(item)]][1:])


def lines_of(item: Decoded) -> list[str]:
    """The utterance's id and counts, then the alignment of its words (characters in scripts without spaces)."""
    utterance = item.utterance
    facts = [_told("characters", item.chars), _told("words", item.mixed)]
    if utterance.language:
        facts.append(utterance.language)
    if utterance.duration_s is not None:
        facts.append(f"{utterance.duration_s:.2f} s")
    alignment = align(item.text, utterance.text, item.rules, "mer")
    return [f"{utterance.id}  {', '.join(facts)}", *(f"  {line}" for line in alignment_lines(alignment, WIDTH))]


def _told(unit: str, counts: ErrorCounts) -> str:
    edits = f"S {counts.substitutions} D {counts.deletions} I {counts.insertions}"
    return f"{counts.errors} of {counts.reference_length} {unit} ({edits})"
