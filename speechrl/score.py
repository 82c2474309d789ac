"""`speechrl score`: what a reward says of given hypotheses, so that it can be tried before a training run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from rich.table import Table
from rich.text import Text

from speechrl.algorithms.advantages import ADVANTAGES, GroupRewards, as_rows, has_spread
from speechrl.config import ScoreConfig
from speechrl.data.manifest import (
    ManifestError,
    read_duration_s,
    read_manifest,
    read_rows,
    typed,
    write_manifest,
)
from speechrl.disk import check_writable, writing
from speechrl.reward.client import RewardClient
from speechrl.reward.summary import ColumnSummary, summarise
from speechrl.tracking import wide_console
from speechrl.types import FinishReason, Group, Prompt, Rollout, Scores, Utterance


@dataclass(frozen=True)
class Hypotheses:
    """Groups in the order of their first lines; places: (group, rollout) of every line of the file."""

    groups: list[Group]
    places: list[tuple[int, int]]


@dataclass(frozen=True)
class ScoreReport:
    """What is printed. columns: as `summarise` gives them; weights: {} if the reward does not tell them."""

    columns: dict[str, ColumnSummary]
    weights: Mapping[str, float]
    title: str


def score(config: ScoreConfig) -> ScoreReport:
    """Scores every hypothesis, writes --out and returns the summary.

    --out has a line for each of --hypotheses, in their order: id, text, reward (null abstains), parts, advantage (null
    as the reward; 0 in a group that has fewer than 2 rewards). Raises ValueError that names the flag, or file:line.
    """
    for flag, path in (("--manifest", config.manifest), ("--hypotheses", config.hypotheses)):
        if not Path(path).exists():
            raise ValueError(f"{flag} {path}: no such file")
    _check_out(config)
    utterances = read_manifest(config.manifest)
    hypotheses = read_hypotheses(config.hypotheses, utterances, config.manifest)
    reward = RewardClient.from_options(config.reward)
    try:
        reward.probe()
        scores = reward.score(hypotheses.groups)
    finally:
        reward.close()
    options = config.algo.advantage
    rewards = GroupRewards.from_scores(scores, options.estimator)
    advantages = as_rows(ADVANTAGES[options.estimator](rewards), scores)
    with writing("--out", config.out):
        write_manifest(config.out, (_line(hypotheses, scores, advantages, *place) for place in hypotheses.places))
    num_groups, num_live = len(scores), int(has_spread(rewards, options.min_std).sum())
    title = (
        f"{len(hypotheses.places)} hypotheses of {num_groups} of {len(utterances)} utterances; "
        f"{num_live} of {num_groups} groups carry a gradient ({options.estimator})"
    )
    return ScoreReport(summarise(scores), scores[0].weights, title)


def _check_out(config: ScoreConfig) -> None:
    """Raises ValueError before the reward is asked, whose answers would be lost, and for an --out that is an input."""
    check_writable("--out", config.out)
    for flag, path in (("--manifest", config.manifest), ("--hypotheses", config.hypotheses)):
        if Path(config.out).exists() and Path(config.out).samefile(path):
            raise ValueError(f"--out {config.out} is {flag}, which it would overwrite: give another file")


def read_hypotheses(path: str, utterances: Sequence[Utterance], manifest: str) -> Hypotheses:
    """Lines with `id` and `text` (and `raw_text`, `said_language`, `finish_reason`, `duration_s` where they are known)
    as groups. A duration counts where the manifest has none.

    The lines of an id are one group, wherever they stand. Raises ManifestError (a ValueError) with file:line for an id
    that the manifest has not, or a line without text; also for a file without lines.
    """
    known = {utterance.id: utterance for utterance in utterances}
    rollouts: dict[str, list[Rollout]] = {}
    lines: list[tuple[str, int]] = []
    for where, _, row in read_rows(Path(path)):
        id_ = typed(row, "id", (str, int), where)
        if id_ is None or str(id_) not in known:
            told = f"there is no id {str(id_)!r} in {manifest}" if id_ is not None else f"no `id` (keys: {sorted(row)})"
            raise ManifestError(f"{where}: {told}; each hypothesis names its utterance of the manifest")
        duration_s = read_duration_s(row, where)
        if known[str(id_)].duration_s is None:
            known[str(id_)] = replace(known[str(id_)], duration_s=duration_s)
        group = rollouts.setdefault(str(id_), [])
        lines.append((str(id_), len(group)))
        group.append(_rollout(row, where))
    if not lines:
        raise ManifestError(f'{path}: no hypotheses; write one {{"id": ..., "text": ...}} a line')
    numbers = {name: index for index, name in enumerate(rollouts)}
    groups = [
        Group(Prompt(known[name], (), known[name].prompt or ""), tuple(group)) for name, group in rollouts.items()
    ]
    return Hypotheses(groups, [(numbers[name], index) for name, index in lines])


def _rollout(row: Mapping[str, Any], where: str) -> Rollout:
    text, raw_text = typed(row, "text", str, where), typed(row, "raw_text", str, where)
    if text is None:
        raise ManifestError(f'{where}: no `text` (keys: {sorted(row)}); give the hypothesis, "" for silence')
    finish_reason: Any = typed(row, "finish_reason", str, where) or "stop"
    if finish_reason not in get_args(FinishReason):
        raise ManifestError(
            f"{where}: `finish_reason` is {finish_reason!r}; it must be one of {get_args(FinishReason)}"
        )
    return Rollout(
        token_ids=(),
        logprobs=(),
        finish_reason=finish_reason,
        weights_version=0,
        raw_text=text if raw_text is None else raw_text,
        text=text,
        language=typed(row, "said_language", str, where),
    )


def _line(
    hypotheses: Hypotheses,
    scores: Sequence[Scores],
    advantages: Sequence[Sequence[float | None]],
    group: int,
    index: int,
) -> dict[str, Any]:
    said = hypotheses.groups[group]
    return {
        "id": said.utterance.id,
        "text": said.rollouts[index].text,
        "reward": scores[group].rewards[index],
        "parts": {name: values[index] for name, values in scores[group].parts.items()},
        "advantage": advantages[group][index],
    }


def print_summary(report: ScoreReport, console: Console | None = None) -> None:
    """A row for the reward and one for each part; - where a number is not defined."""
    console = console or wide_console()
    console.print(Text(report.title), soft_wrap=True)  # as a title, the table's width would fold it
    table = Table()
    table.add_column("part", no_wrap=True)
    for name in ("weight", "mean", "std", "abstained", "correlation", "in groups"):
        table.add_column(name, justify="right")
    for name, column in report.columns.items():
        numbers = [report.weights.get(name), column.mean, column.std, column.abstained_share]
        numbers += [column.correlation, column.group_correlation] if name else [None, None]
        table.add_row(Text(name or "reward"), *("-" if number is None else f"{number:.3f}" for number in numbers))
    console.print(table)
