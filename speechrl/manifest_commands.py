"""`speechrl manifest stats | filter | split | mix`: manifests in, manifests and numbers out."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from speechrl.data.manifest import read_manifest, read_manifests, row_of, write_manifest
from speechrl.data.manifest_stats import Figures, by_language, draw, figures, measured
from speechrl.data.selection import first_of_each_text, keep_if, mix, read_condition, split, without_texts_of
from speechrl.disk import check_writable, write_lines, writing
from speechrl.manifest_options import FilterConfig, MixConfig, SplitConfig, StatsConfig
from speechrl.settings import named_numbers
from speechrl.tracking import wide_console
from speechrl.types import Utterance


def write(path: Path, utterances: Sequence[Utterance]) -> None:
    """Write a manifest and say what it holds."""
    with writing("--out", path):
        write_manifest(path, (row_of(utterance, path.parent) for utterance in utterances))
    seconds = sum(utterance.duration_s or 0.0 for utterance in utterances)
    print(f"{path}: {len(utterances):,} utterances" + (f", {seconds / 3600:,.2f} h" if seconds else ""), flush=True)


def stats(config: StatsConfig) -> dict[str, Figures]:
    """Print a table, all languages first; write --out and --png. Returns what the table shows."""
    for flag, path in (("--out", config.out), ("--png", config.png)):
        if path:
            check_writable(flag, path)
    utterances = measured(read_manifests(config.manifest))
    table = {"all": figures(utterances)} | {name: figures(part) for name, part in by_language(utterances).items()}
    _print_figures(table)
    if config.png:
        with writing("--png", config.png):
            draw(utterances, Path(config.png))
    if config.out:
        with writing("--out", config.out):
            write_lines(config.out, [json.dumps({name: asdict(item) for name, item in table.items()}, indent=2)])
    return table


def _print_figures(rows: dict[str, Figures]) -> None:
    table = Table()
    columns = ("utterances", "hours", "seconds 5 %", "50 %", "95 %", "longest", "characters", "a second", "texts")
    for name in ("language", *columns, "speakers"):
        table.add_column(name, justify="right")
    for name, item in rows.items():
        seconds = [f"{value:.1f}" for value in item.duration_s[1:]] or ["-"] * 4
        rate = f"{item.characters_per_s[2]:.1f}" if item.characters_per_s else "-"
        texts, speakers = f"{item.distinct_texts:,}", f"{item.speakers:,}" if item.speakers else "-"
        counts = (f"{item.utterances:,}", f"{item.hours:,.2f}", *seconds, f"{item.characters:,}", rate, texts, speakers)
        table.add_row(name, *counts)
    wide_console().print(table)


def filter_manifest(config: FilterConfig) -> None:
    """Write what passes, and say how many each rule left out."""
    check_writable("--out", config.out)
    conditions = [read_condition(text) for text in config.keep]
    utterances = read_manifests(config.manifest)
    if any(condition.key in ("duration_s", "characters_per_s") for condition in conditions):
        utterances = measured(utterances)
    kept, failed = keep_if(utterances, conditions)
    left_out = dict(failed)
    if config.exclude_texts_of:
        others = [utterance for path in config.exclude_texts_of for utterance in read_manifest(path)]
        before, kept = len(kept), without_texts_of(kept, others)
        left_out["--exclude_texts_of"] = before - len(kept)
    if config.max_per_text:
        before, kept = len(kept), first_of_each_text(kept, config.max_per_text)
        left_out[f"--max_per_text {config.max_per_text}"] = before - len(kept)
    for rule, count in left_out.items():
        print(f"left out by {rule}: {count:,} of {len(utterances):,}")
    if not kept:
        raise ValueError(f"no utterance of {' '.join(config.manifest)} is left; loosen the rules above")
    write(Path(config.out), kept)


def split_manifest(config: SplitConfig) -> None:
    """Write a manifest per part."""
    shares = named_numbers(config.parts, "--parts")
    for name in shares:
        check_writable("--out", Path(config.out) / f"{name}.jsonl")
    utterances = read_manifests(config.manifest)
    parts = split(utterances, shares, config.keep_together, config.seed)
    for name, inside in parts.items():
        write(Path(config.out) / f"{name}.jsonl", inside)


def mix_manifests(config: MixConfig) -> None:
    """Write one manifest of several."""
    check_writable("--out", config.out)
    sources = [read_manifest(path) for path in config.manifest]
    if config.prefix_ids:
        sources = [
            [replace(utterance, id=f"{Path(path).stem}/{utterance.id}") for utterance in source]
            for path, source in zip(config.manifest, sources, strict=True)
        ]
    seen: dict[str, str] = {}
    for utterance in (utterance for source in sources for utterance in source):
        if utterance.id in seen:
            raise ValueError(
                f"{utterance.where}: id {utterance.id!r} stands already at {seen[utterance.id]}; add --prefix_ids"
            )
        seen[utterance.id] = utterance.where
    write(Path(config.out), mix(sources, config.probabilities, config.num_utterances, config.repeat, config.seed))


TOOLS: dict[str, Callable[[Any], object]] = {
    "stats": stats,
    "filter": filter_manifest,
    "split": split_manifest,
    "mix": mix_manifests,
}
