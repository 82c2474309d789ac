"""Greedy decoding of held-out sets and their corpus metrics; the same numbers in training and in `speechrl eval`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from speechrl.config import EvalConfig, named_paths
from speechrl.data.mix import read_checked
from speechrl.launch import cluster, start_inference, stop
from speechrl.models.feature_cache import check_feature_cache
from speechrl.models.load import read_family
from speechrl.reward.client import RewardClient
from speechrl.reward.keywords import KeywordCounts, keyword_counts
from speechrl.reward.metrics import ErrorCounts, char_counts, word_counts
from speechrl.rollout.engine import RolloutEngine, Sampling
from speechrl.sections import Decoding
from speechrl.statistics import bootstrap_interval
from speechrl.training.group import feature_cache_metrics
from speechrl.types import Group, Scores, Utterance

CHUNK = 1024  # utterances whose features are in memory at once


@dataclass(frozen=True)
class Decoded:
    """One utterance with its greedy transcript, its error counts, and its reward where one was asked for."""

    utterance: Utterance
    text: str
    language: str | None
    finish_reason: str
    chars: ErrorCounts
    words: ErrorCounts
    keywords: KeywordCounts
    reward: float | None = None


@dataclass(frozen=True)
class Rate:
    """A corpus metric as a ratio of sums, with its bootstrap interval over utterances (95 %)."""

    value: float
    low: float
    high: float


def greedy(options: Decoding) -> Sampling:
    """How evaluation decodes."""
    return Sampling(temperature=0.0, max_new_tokens=options.max_new_tokens, batch_size=options.batch_size)


def decode(
    engine: RolloutEngine, utterances: Sequence[Utterance], options: Decoding, reward: RewardClient | None
) -> list[Decoded]:
    """Transcribe every utterance greedily and count its errors."""
    groups: list[Group] = []
    for start in range(0, len(utterances), CHUNK):
        groups += engine.generate(utterances[start : start + CHUNK], greedy(options))
        engine.forget()
    scores: Sequence[Scores | None] = reward.score(groups) if reward is not None else [None] * len(groups)
    return [_decoded(group, score) for group, score in zip(groups, scores, strict=True)]


def _decoded(group: Group, score: Scores | None) -> Decoded:
    utterance, rollout = group.utterance, group.rollouts[0]
    return Decoded(
        utterance=utterance,
        text=rollout.text,
        language=rollout.language,
        finish_reason=rollout.finish_reason,
        chars=char_counts(rollout.text, utterance.text, utterance.language),
        words=word_counts(rollout.text, utterance.text, utterance.language),
        keywords=keyword_counts(rollout.text, utterance.keywords, utterance.text, utterance.language),
        reward=score.rewards[0] if score is not None else None,
    )


# name -> (numerator, denominator) of one utterance; None where it does not count
METRICS: dict[str, Callable[[Decoded], tuple[float, float] | None]] = {
    "cer": lambda item: (item.chars.errors, item.chars.reference_length),
    "wer": lambda item: (item.words.errors, item.words.reference_length),
    "insertion_rate": lambda item: (item.chars.insertions, item.chars.reference_length),
    "keyword_f1": lambda item: _f1(item.keywords),
    "exact": lambda item: (float(item.chars.errors == 0), 1.0),
    "overlong": lambda item: (float(item.finish_reason == "length"), 1.0),
    "reward": lambda item: None if item.reward is None else (item.reward, 1.0),
}


def _f1(counts: KeywordCounts) -> tuple[float, float] | None:
    total = 2 * counts.hits + counts.misses + counts.false_insertions
    return (2.0 * counts.hits, float(total)) if total else None


def rates(decoded: Sequence[Decoded]) -> dict[str, float]:
    """Corpus metrics; those that nothing counts towards are left out."""
    return {
        name: sum(n for n, _ in pairs) / max(sum(d for _, d in pairs), 1) for name, pairs in _pairs(decoded).items()
    }


def rates_with_intervals(decoded: Sequence[Decoded], seed: int) -> dict[str, Rate]:
    """Corpus metrics with bootstrap intervals over utterances."""
    values = rates(decoded)
    return {
        name: Rate(values[name], *bootstrap_interval([n for n, _ in pairs], [d for _, d in pairs], seed=seed))
        for name, pairs in _pairs(decoded).items()
    }


def _pairs(decoded: Sequence[Decoded]) -> dict[str, list[tuple[float, float]]]:
    found = {
        name: [pair for item in decoded if (pair := pair_of(item)) is not None] for name, pair_of in METRICS.items()
    }
    return {name: pairs for name, pairs in found.items() if pairs}


def evaluate_sets(
    engine: RolloutEngine,
    sets: Mapping[str, Sequence[Utterance]],
    options: Decoding,
    reward: RewardClient | None = None,
) -> dict[str, float]:
    """Metrics of every named set as eval/NAME/METRIC, with the newest weights."""
    started, metrics = time.monotonic(), {}
    engine.sync()
    for name, utterances in sets.items():
        for metric, value in rates(decode(engine, utterances, options, reward)).items():
            metrics[f"eval/{name}/{metric}"] = value
    engine.release()
    return metrics | {"time/eval_s": time.monotonic() - started}


def evaluate_models(config: EvalConfig) -> dict:
    """`speechrl eval`: every model on every set. Writes eval.json and MODEL.SET.jsonl; returns what eval.json holds."""
    out = Path(config.output_dir)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--output_dir {out} can't be made: {error.strerror}") from error
    sets = {
        name: read_checked(path, config.data)
        for name, path in named_paths(config.eval.dataset, "--eval.dataset").items()
    }
    reward = RewardClient.from_options(config.reward) if config.reward.remote_url else None
    if reward is not None:
        reward.probe()
    for path in named_paths(config.model, "--model").values():
        _, family = read_family(path, config.actor.trust_remote_code)  # a wrong path is told before the ranks start
        check_feature_cache(config.data, family, here=not config.ray.address)
    report: dict = {"models": {}, "seed": config.seed}
    with cluster(config.ray, config.actor.num_ranks):
        for model, path in named_paths(config.model, "--model").items():
            engine = start_inference(config, path)
            report["models"][model] = {"path": path, "sets": {}}
            for name, utterances in sets.items():
                started = time.monotonic()
                decoded = decode(engine, utterances, config.eval, reward)
                _write_hypotheses(out / f"{model}.{name}.jsonl", decoded)
                report["models"][model]["sets"][name] = {
                    "utterances": len(utterances),
                    "seconds": round(time.monotonic() - started, 2),
                    "metrics": {key: asdict(rate) for key, rate in rates_with_intervals(decoded, config.seed).items()},
                } | feature_cache_metrics(config.data, engine)
            stop(engine)
    (out / "eval.json").write_text(json.dumps(report, indent=2))
    return report


def _write_hypotheses(path: Path, decoded: Sequence[Decoded]) -> None:
    with open(path, "w", encoding="utf-8") as handle:
        for item in decoded:
            line = {
                "id": item.utterance.id,
                "reference": item.utterance.text,
                "text": item.text,
                "language": item.language,
                "finish_reason": item.finish_reason,
                "char_errors": item.chars.errors,
                "reward": item.reward,
            }
            handle.write(json.dumps(line, ensure_ascii=False) + "\n")


def print_report(report: dict) -> None:
    """One table per set: a row per model, a column per metric, percentages with their 95 % intervals."""
    console = Console(width=None if sys.stdout.isatty() else 140)
    names = list(next(iter(report["models"].values()))["sets"])
    for name in names:
        rows = {model: entry["sets"][name] for model, entry in report["models"].items()}
        columns = list(next(iter(rows.values()))["metrics"])
        table = Table("model", *columns, title=f"{name}: {next(iter(rows.values()))['utterances']} utterances, %")
        for model, row in rows.items():
            cells = [row["metrics"][column] for column in columns]
            table.add_row(
                model, *(f"{100 * c['value']:.1f} [{100 * c['low']:.1f}, {100 * c['high']:.1f}]" for c in cells)
            )
        console.print(table)
