"""The main loop: the order of the stages, and nothing else."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from speechrl import stages
from speechrl.algorithms.schedules import learning_rate
from speechrl.config import TrainConfig
from speechrl.data.mix import MixedLoader, read_sources
from speechrl.evaluate import evaluate_sets
from speechrl.evaluation.groups import read_sets
from speechrl.launch import cluster, num_beside_ranks, start_engine, start_policy, start_reference
from speechrl.models.resources import check_resources
from speechrl.preflight import preflight, try_reward
from speechrl.reward.client import RewardClient
from speechrl.rollout_log import RolloutLog
from speechrl.saving import Saver
from speechrl.tracking import Tracker
from speechrl.training.fingerprint import Found, resumable
from speechrl.training.group import feature_cache_metrics
from speechrl.training.run_folder import RunFolder
from speechrl.types import Utterance

SELF_TIMED = ("sync", "wake", "release", "eval")  # stages that measure their own seconds


@dataclass(frozen=True)
class Inputs:
    """What a run reads, checked."""

    loader: MixedLoader
    sets: dict[str, list[Utterance]]
    reward: RewardClient
    run: RunFolder
    total_steps: int
    found: Found | None  # what --ckpt.resume goes on from


def prepare(config: TrainConfig) -> Inputs:
    """Read and check everything that can be known before Ray starts. Raises ValueError with the flag or the line."""
    sources = read_sources(config.data)
    sets = read_sets(config.eval, config.data)
    loader = MixedLoader.from_options(
        sources, config.data, config.rollout.batch_size, config.train.seed, "--rollout.batch_size"
    )
    builder = preflight(config, {**dict(zip(config.data.prompt_dataset, sources, strict=True)), **sets})
    total_steps = config.train.max_steps or config.train.num_episodes * loader.num_batches_per_epoch
    run = RunFolder(config)
    found = resumable(config, run, loader)
    reward = RewardClient.from_options(config.reward)
    reward.probe()
    print(*check_resources(config), try_reward(reward, builder, sources[0][0], config), sep="\n", flush=True)
    if config.rollout.top_p < 1 or config.rollout.top_k:
        print("warning: --rollout.top_p and top_k truncate: recorded log-probs are not the policy's own", flush=True)
    return Inputs(loader, sets, reward, run, total_steps, found)


def train(config: TrainConfig) -> Path:
    """Reinforcement learning. Returns the folder of the last export (or of the run, with --ckpt.no_save_hf)."""
    inputs = prepare(config)
    loader, sets, run, total_steps = inputs.loader, inputs.sets, inputs.run, inputs.total_steps
    resources = (config.ray, config.actor.num_ranks, num_beside_ranks(config))
    with closing(inputs.reward) as reward, cluster(*resources), ExitStack() as stack:
        policy = start_policy(config)
        reference = start_reference(config, policy)
        engine = start_engine(config, policy)
        facts = stages.announce(policy.describe()[0], config.train)
        saver = Saver(config, run, policy, loader, facts["model_digest"], inputs.found)
        run.claim()
        tracker = Tracker.from_options(config.tracking, run.path, config.model_dump(mode="json"), total_steps)
        first_step = saver.resume(tracker)
        log = RolloutLog(config.tracking, run.path, first_step)
        steps = stages.profiled(range(first_step, total_steps), config.tracking.profile_steps, policy, run.path)
        stack.enter_context(saver.rescuing())
        for step in steps:
            clock, last = Clock(), step + 1 == total_steps
            metrics = engine.sync()
            with clock("time/rollout_s"):
                groups, scores, collected = stages.collect(config, step, loader, engine, reward, log, last)
            metrics |= engine.timings() | engine.release()
            with clock("time/reference_s"):
                ref_logprobs = stages.reference_logprobs(config, groups, reference, policy)
            with clock("time/advantages_s"):
                train_groups, advantage_metrics = stages.advantages(config, groups, scores, ref_logprobs)
            rate = learning_rate(
                step, total_steps, config.actor.adam.lr, config.actor.lr_warmup_ratio * total_steps,
                config.actor.min_lr_ratio, config.actor.lr_scheduler,
            )  # fmt: skip
            with clock("time/update_s"):
                updated = saver.attempt(step + 1, partial(stages.update, config, train_groups, policy, rate))
            metrics |= collected | advantage_metrics | updated
            policy.forget()
            if reference is not None:
                reference.forget()
            if sets and config.eval.steps and (last or (step + 1) % config.eval.steps == 0):
                metrics |= evaluate_sets(engine, sets, config.eval, reward, config.train.seed)
            metrics |= feature_cache_metrics(config.data, policy, reference)
            if last:
                stages.check_encoder(facts, policy.describe())
            metrics |= saver.watch.look(step + 1, metrics) | saver.timings() | clock.metrics(metrics)
            metrics["rollout/tokens_per_s"] = metrics["rollout/tokens"] / metrics["time/rollout_s"]
            # all is told before the checkpoint: what comes after a checkpoint is forgotten by a resumed run
            tracker.log(step + 1, metrics)
            tracker.progress_line(step + 1, metrics)
            if config.tracking.sample_steps and (step % config.tracking.sample_steps == 0 or last):
                stages.show_samples(config, step + 1, tracker, groups, scores, train_groups)
            log.write(step + 1, train_groups, ref_logprobs)
            saver.after_step(step + 1, metrics, last)
    tracker.close()
    return saver.result


class Clock:
    """Seconds of the stages of one step."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - started

    def metrics(self, told: Mapping[str, float]) -> dict[str, float]:
        """time/STAGE_s of each stage, time/step_s of the whole, and time/other_s of what no stage accounts for.

        told: metrics of the step, with the seconds that stages measured themselves.
        """
        step_s = time.monotonic() - self._started
        stages_s = sum(self._seconds.values()) + sum(told.get(f"time/{name}_s", 0.0) for name in SELF_TIMED)
        return self._seconds | {"time/step_s": step_s, "time/other_s": step_s - stages_s}
