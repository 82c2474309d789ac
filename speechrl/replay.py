"""`speechrl replay`: the stored rollouts of a run through its reward, advantages and loss again, without its model.

Shapes: B completions, R response tokens padded right.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

import torch
from rich.table import Table
from torch import Tensor

from speechrl import stages
from speechrl.algorithms.correction import correction
from speechrl.algorithms.kl import masked_kl
from speechrl.algorithms.losses import NORMALISERS, POLICY_LOSSES
from speechrl.config import ReplayConfig, TrainConfig, load_saved
from speechrl.data.manifest import write_manifest
from speechrl.disk import check_writable, writing
from speechrl.reward.client import RewardClient
from speechrl.rollout_log import Logged, read, steps_of
from speechrl.tracking import step_lines, wide_console
from speechrl.training.batch import pad
from speechrl.types import Scores, TrainGroup

TOLERANCE = 1e-6  # below it a reward or an advantage is the same


@dataclass(frozen=True)
class Replayed:
    """What a step gave and gives. Means are over rewards that don't abstain; loss is None where nothing is trained on.

    loss: of the step's first optimiser step, where the policy still is the one that sampled; logged_loss: the run's own
    train/loss, which is the same number where a batch has one optimiser step and sampler and trainer agree.
    """

    step: int
    groups: int
    completions: int
    stored_reward: float | None
    reward: float | None
    changed_rewards: int
    largest_reward_change: float
    changed_advantages: int
    largest_advantage_change: float
    loss: float | None
    logged_loss: float | None


def replay(config: ReplayConfig) -> list[Replayed]:
    """Every stored step, or those of --steps; written to --out as JSON lines if that is given.

    Raises ValueError where RUN is no run of `speechrl train` with rollouts, or --out can't be written, and RewardError
    as training would.
    """
    run = Path(config.run)
    if not (run / "config.yaml").exists():
        raise ValueError(f"RUN {run}: no config.yaml there; give the folder of a run (--ckpt.output_dir)")
    saved = load_saved(str(run / "config.yaml"))
    there = steps_of(run)
    if not isinstance(saved, TrainConfig) or not there:
        raise ValueError(f"RUN {run}: no rollouts there; train with --tracking.save_rollouts")
    if saved.data.speech_style:
        raise ValueError(f"RUN {run}: its rollouts are speech, and what is stored are tokens, not what a reward hears")
    absent = sorted(set(config.steps) - set(there))
    if absent:
        raise ValueError(f"--steps {absent[0]}: there are rollouts of steps {there[0]} to {there[-1]}")
    if config.out:
        check_writable("--out", config.out)
    options = config.reward if config.reward.remote_url else saved.reward
    if config.estimator:
        advantage = saved.algo.advantage.model_copy(update={"estimator": config.estimator})
        saved = saved.model_copy(update={"algo": saved.algo.model_copy(update={"advantage": advantage})})
    losses = _logged_losses(run / "metrics.jsonl")
    with closing(RewardClient.from_options(options)) as reward:
        steps = [
            _replay_step(saved, step, list(read(run, step)), reward, losses.get(step)) for step in config.steps or there
        ]
    if config.out:
        with writing("--out", config.out):
            write_manifest(config.out, map(asdict, steps))
    return steps


def _replay_step(
    config: TrainConfig, step: int, logged: Sequence[Logged], reward: RewardClient, logged_loss: float | None
) -> Replayed:
    groups = [item.group for item in logged]
    scores = stages.punished(config, groups, reward.score(groups))
    old = [value for item in logged for value in item.scores.rewards]
    new = [value for score in scores for value in score.rewards]
    kept = [(item, score) for item, score in zip(logged, scores, strict=True) if item.kept]
    refs = [[list(row) for row in item.ref_logprobs] for item, _ in kept if item.ref_logprobs]
    train_groups, _ = stages.advantages(config, [item.group for item, _ in kept], [score for _, score in kept], refs)
    before = list(chain.from_iterable(_advantages(item.train_group, item.scores) for item, _ in kept))
    by_id = {item.group.utterance.id: item for item in train_groups}
    after = list(chain.from_iterable(_advantages(by_id.get(item.group.utterance.id), score) for item, score in kept))
    reward_changes, advantage_changes = _changes(old, new), _changes(before, after)
    return Replayed(
        step=step,
        groups=len(logged),
        completions=len(new),
        stored_reward=_mean(old),
        reward=_mean(new),
        changed_rewards=len(reward_changes),
        largest_reward_change=max(reward_changes, default=0.0),
        changed_advantages=len(advantage_changes),
        largest_advantage_change=max(advantage_changes, default=0.0),
        loss=loss_of(config, train_groups) if train_groups else None,
        logged_loss=logged_loss,
    )


def loss_of(config: TrainConfig, train_groups: Sequence[TrainGroup]) -> float:
    """The loss of one optimiser step on these groups by the policy that sampled them: every ratio is 1."""
    algo = config.algo
    rows = [
        (rollout.logprobs, advantage, item.ref_logprobs[index] if item.ref_logprobs else ())
        for item in train_groups
        for index, (rollout, advantage) in enumerate(zip(item.group.rollouts, item.advantages, strict=True))
        if advantage is not None
    ]
    logprobs_BR = _padded([logprobs for logprobs, _, _ in rows])
    mask_BR = pad([[1] * len(logprobs) for logprobs, _, _ in rows], 0, torch.bool)
    advantages_B = torch.tensor([advantage for _, advantage, _ in rows])
    policy = POLICY_LOSSES[algo.policy_loss](
        logprobs_BR, logprobs_BR, advantages_B, mask_BR, *config.actor.eps_clip_low_high
    )
    fix = algo.correction
    weight_BR, _ = correction(fix.method, logprobs_BR, logprobs_BR, mask_BR, fix.bounds)
    loss_BR = policy.loss_BT * weight_BR
    if train_groups[0].ref_logprobs and algo.kl.use_loss:
        ref_BR = _padded([ref for _, _, ref in rows])
        loss_BR = loss_BR + algo.kl.init_coef * masked_kl(algo.kl.estimator, logprobs_BR, ref_BR, mask_BR)
    length = float(algo.constant_length or config.rollout.max_new_tokens)
    share_BR = NORMALISERS[algo.loss_normalization](mask_BR, float(mask_BR.sum()), float(len(rows)), length)
    return float((loss_BR * share_BR).sum())


def _padded(values: Sequence[Sequence[float]]) -> Tensor:
    return pad(values, 0.0, torch.float32)


def _advantages(item: TrainGroup | None, scores: Scores) -> Sequence[float | None]:
    """Of each completion; 0 in a group that was left out."""
    return item.advantages if item is not None else [None if value is None else 0.0 for value in scores.rewards]


def _changes(before: Sequence[float | None], after: Sequence[float | None]) -> list[float]:
    """How far the pairs differ that do; 0 for one that began or ceased to abstain."""
    found = []
    for one, two in zip(before, after, strict=True):
        if one is None or two is None:
            found += [0.0] if one is not two else []
        elif abs(one - two) > TOLERANCE:
            found.append(abs(one - two))
    return found


def _mean(values: Sequence[float | None]) -> float | None:
    given = [value for value in values if value is not None]
    return sum(given) / len(given) if given else None


def _logged_losses(path: Path) -> dict[int, float | None]:
    return {line["step"]: line.get("train/loss") for _, line in step_lines(path)}


def print_replay(steps: Sequence[Replayed]) -> None:
    """A line for each step."""
    table = Table(title="rewards, advantages and loss: stored and now", title_justify="left")
    for name in ("step", "groups", "completions", "reward", "now", "changed", "largest", "advantages changed",
                 "largest", "loss", "in the run"):  # fmt: skip
        table.add_column(name, justify="right")
    for item in steps:
        table.add_row(*("-" if value is None else _short(value) for value in asdict(item).values()))
    wide_console().print(table)


def _short(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.6g}"
