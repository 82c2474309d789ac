"""What a manifest holds, in numbers and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from speechrl.data.audio import duration_s_of
from speechrl.data.languages import language_code
from speechrl.data.selection import num_characters, text_key
from speechrl.types import Utterance

PERCENTILES = (0, 5, 50, 95, 100)
THREADS = 8  # reading headers is waiting for the disk
NONE = "none"


@dataclass(frozen=True)
class Figures:
    """Of a set of utterances. duration_s and characters_per_s: their PERCENTILES; empty without audio."""

    utterances: int
    hours: float
    duration_s: tuple[float, ...]
    characters: int
    characters_per_s: tuple[float, ...]
    distinct_texts: int
    silent: int
    with_keywords: int
    speakers: int


def measured(utterances: Sequence[Utterance]) -> list[Utterance]:
    """With durations: where the manifest tells none, those of the headers. Raises AudioError naming file:line."""

    def one(utterance: Utterance) -> Utterance:
        if utterance.duration_s is not None or utterance.audio is None:
            return utterance
        return replace(
            utterance, duration_s=duration_s_of(utterance.audio, f"{utterance.where}: utterance {utterance.id}")
        )

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(one, utterances))


def figures(utterances: Sequence[Utterance]) -> Figures:
    """Of utterances with durations."""
    lengths_s = [utterance.duration_s for utterance in utterances if utterance.duration_s is not None]
    return Figures(
        utterances=len(utterances),
        hours=round(sum(lengths_s) / 3600, 4),
        duration_s=_percentiles(lengths_s),
        characters=sum(num_characters(utterance) for utterance in utterances),
        characters_per_s=_percentiles(speaking_rates(utterances)),
        distinct_texts=len({text_key(utterance) for utterance in utterances}),
        silent=sum(not text_key(utterance) for utterance in utterances),
        with_keywords=sum(bool(utterance.keywords) for utterance in utterances),
        speakers=len({utterance.metadata["speaker"] for utterance in utterances if "speaker" in utterance.metadata}),
    )


def by_language(utterances: Sequence[Utterance]) -> dict[str, list[Utterance]]:
    """{language code, or "none": utterances}, the largest first."""
    found: dict[str, list[Utterance]] = {}
    for utterance in utterances:
        found.setdefault(language_code(utterance.language) if utterance.language else NONE, []).append(utterance)
    return dict(sorted(found.items(), key=lambda item: (-len(item[1]), item[0])))


def speaking_rates(utterances: Sequence[Utterance]) -> list[float]:
    """Characters a second of every utterance with audio."""
    return [num_characters(utterance) / utterance.duration_s for utterance in utterances if utterance.duration_s]


def _percentiles(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(round(float(value), 3) for value in np.percentile(values, PERCENTILES)) if values else ()


def draw(utterances: Sequence[Utterance], path: Path) -> None:
    """Write a PNG of four panels: durations, characters, characters a second, hours by language."""
    from matplotlib.figure import Figure  # takes a second to import; no pyplot, so no display is looked for

    languages = by_language(utterances)
    figure = Figure(figsize=(11, 7), layout="constrained")
    axes = figure.subplots(2, 2).flat
    panels = (
        ("duration (s)", [utterance.duration_s for utterance in utterances if utterance.duration_s]),
        ("characters", [num_characters(utterance) for utterance in utterances]),
        ("characters a second", speaking_rates(utterances)),
    )
    for axis, (name, values) in zip(axes, panels, strict=False):
        axis.hist(values, bins=40)
        axis.set(xlabel=name, ylabel="utterances")
    hours = [sum(utterance.duration_s or 0.0 for utterance in part) / 3600 for part in languages.values()]
    axes[3].barh(list(languages), hours)
    axes[3].invert_yaxis()
    axes[3].set(xlabel="hours", ylabel="language")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100, format="png")
