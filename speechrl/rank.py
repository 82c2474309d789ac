"""`speechrl rank`: how hard each utterance was for a model, from its sampled transcripts; the easiest first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from speechrl.config import load_saved
from speechrl.data.curriculum import DIFFICULTY
from speechrl.data.manifest import read_manifests
from speechrl.data.normalise import TextRules
from speechrl.data.text_rules import read_rules
from speechrl.disk import check_writable
from speechrl.evaluation.hypotheses import decoded, read_hypotheses
from speechrl.evaluation.metrics import Samples
from speechrl.manifest_commands import write
from speechrl.manifest_options import RankConfig
from speechrl.rollout_log import read, steps_of
from speechrl.types import Utterance

SOLVED_AT: Mapping[str, float] = {"cer": 0.0, "reward": 1.0}


@dataclass(frozen=True)
class Attempt:
    """What came of one sampled transcript of an utterance.

    cer: character error rate, clipped at 1; on silence 1 for any text. reward: None where none was asked for, or it
    abstained. where: file:line.
    """

    utterance_id: str
    reference: str
    cer: float
    reward: float | None
    where: str


@dataclass(frozen=True)
class Difficulty:
    """Of one utterance: mean and standard deviation of its attempts' difficulty, share that was solved."""

    difficulty: float
    difficulty_std: float
    solved_share: float
    num_samples: int


def attempts_of(groups: Iterable[Samples]) -> Iterator[Attempt]:
    """The attempts of decoded utterances, wherever those were read."""
    for samples in groups:
        for item in samples:
            counts, utterance = item.chars, item.utterance
            length = counts.reference_length
            cer = min(counts.errors / length, 1.0) if length else float(counts.insertions > 0)
            yield Attempt(utterance.id, utterance.text, cer, item.reward, utterance.where)


def difficulties(
    attempts: Iterable[Attempt], score: Literal["cer", "reward"], solved_at: float | None = None
) -> dict[str, Difficulty]:
    """{utterance id: difficulty}. Attempts without the score don't count.

    cer: difficulty is the mean of CERs, solved is at most `solved_at` (0). reward: 1 minus the mean reward, solved is
    at least `solved_at` (1).
    """
    bound = SOLVED_AT[score] if solved_at is None else solved_at
    values: dict[str, list[float]] = {}
    for attempt in attempts:
        value = attempt.cer if score == "cer" else attempt.reward
        if value is not None:
            values.setdefault(attempt.utterance_id, []).append(value)
    found = {}
    for name, given in values.items():
        mean, std = float(np.mean(given)), float(np.std(given))
        solved = sum(value <= bound if score == "cer" else value >= bound for value in given)
        difficulty = mean if score == "cer" else 1.0 - mean
        found[name] = Difficulty(round(difficulty, 6), round(std, 6), solved / len(given), len(given))
    return found


def ranked(utterances: Sequence[Utterance], found: Mapping[str, Difficulty]) -> list[Utterance]:
    """The utterances that have a difficulty, with it in their metadata; the easiest first, ties as they came."""
    known = [
        replace(
            utterance,
            metadata=dict(utterance.metadata)
            | {
                DIFFICULTY: item.difficulty,
                "difficulty_std": item.difficulty_std,
                "solved_share": item.solved_share,
                "num_samples": item.num_samples,
            },
        )
        for utterance in utterances
        if (item := found.get(utterance.id)) is not None
    ]
    return sorted(known, key=lambda utterance: utterance.metadata[DIFFICULTY])


def rank(config: RankConfig) -> Path:
    """Write --out and say how the difficulties lie. Raises ValueError naming the flag, or file:line."""
    check_writable("--out", config.out)
    utterances = read_manifests(config.manifest)
    texts = {utterance.id: utterance for utterance in utterances}
    attempts: list[Attempt] = []
    for attempt in attempts_of(_samples(config)):
        there = texts.get(attempt.utterance_id)
        if there is not None and there.text != attempt.reference:
            raise ValueError(
                f"{attempt.where}: id {attempt.utterance_id!r} has the reference {attempt.reference!r}, at "
                f"{there.where} it is {there.text!r}: not the same utterances"
            )
        attempts.append(attempt)
    found = difficulties(attempts, config.score, config.solved_at)
    known = ranked(utterances, found)
    missing = [utterance for utterance in utterances if utterance.id not in found]
    if missing and (config.on_missing == "stop" or not known):
        sources = (*config.hypotheses, *config.rollouts)
        what = "rewarded hypothesis" if config.score == "reward" else "hypothesis"
        raise ValueError(
            f"{missing[0].where}: utterance {missing[0].id} has no {what} in {' '.join(sources)} (nor have "
            f"{len(missing) - 1} others of {len(utterances)}); --on_missing drop leaves them out"
        )
    if missing:
        print(f"left out without a hypothesis: {len(missing):,} of {len(utterances):,}")
    print(_spread([found[utterance.id] for utterance in known]))
    write(Path(config.out), known)
    return Path(config.out)


def _samples(config: RankConfig) -> Iterator[Samples]:
    for path in config.hypotheses:
        yield from read_hypotheses(Path(path))
    for path in config.rollouts:
        run = Path(path)
        steps = steps_of(run)
        if not steps:
            raise ValueError(f"--rollouts {path}: holds no rollouts; --tracking.save_rollouts makes a run keep them")
        book = _rules_of(run) if config.score == "cer" else {}
        for step in steps:
            yield from (decoded(logged.group, logged.scores, book) for logged in read(run, step))


def _rules_of(run: Path) -> Mapping[str, TextRules]:
    """{language code: rules} that the run compared texts by."""
    saved = load_saved(str(run / "config.yaml"))
    if saved.data.speech_style:
        raise ValueError(f"--rollouts {run}: a run of a model that speaks; take --score reward")
    return read_rules(saved.eval.text_rules, f"{run / 'config.yaml'}: eval.text_rules")


def _spread(items: Sequence[Difficulty]) -> str:
    low, middle, high = np.percentile([item.difficulty for item in items], (10, 50, 90))
    solved = np.array([item.solved_share for item in items])
    counts = f"{int((solved == 1).sum()):,} always solved, {int((solved == 0).sum()):,} never"
    return f"difficulty at 10, 50, 90 %: {low:.3f}, {middle:.3f}, {high:.3f}; of {len(items):,} utterances {counts}"
