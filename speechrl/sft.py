"""Supervised fine-tuning on transcripts: the same ranks, data and exports as reinforcement learning."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

from speechrl import stages
from speechrl.algorithms.schedules import learning_rate
from speechrl.config import SftConfig
from speechrl.data.mix import MixedLoader, ctc_units, read_sources
from speechrl.evaluate import evaluate_sets
from speechrl.evaluation.groups import read_sets
from speechrl.launch import cluster, start_policy
from speechrl.models.resources import check_resources
from speechrl.preflight import preflight
from speechrl.saving import Saver
from speechrl.tracking import Tracker
from speechrl.training.group import feature_cache_metrics
from speechrl.training.run_folder import RunFolder

DEFAULT_BATCH_SIZE = 32  # utterances per optimiser step when --train.batch_size is 0


def sft(config: SftConfig) -> Path:
    """Returns the folder of the last export (or of the run, with --ckpt.no_save_hf)."""
    sources = read_sources(config.data)
    sets = read_sets(config.eval, config.data)
    loader = MixedLoader(
        sources, config.data.probabilities, config.train.batch_size or DEFAULT_BATCH_SIZE, config.train.seed,
        config.data.shuffle, "--train.batch_size",
    )  # fmt: skip
    preflight(config, {**dict(zip(config.data.prompt_dataset, sources, strict=True)), **sets})
    total_steps = config.train.max_steps or config.train.num_episodes * loader.num_batches_per_epoch
    run = RunFolder(config)
    print(*check_resources(config), sep="\n", flush=True)
    with cluster(config.ray, config.actor.num_ranks):
        policy = start_policy(config, ctc_units(sources) if config.sft.ctc_weight else None)
        facts = stages.announce(policy.describe()[0])
        saver = Saver(config, run, policy, loader, facts["model_digest"])
        run.claim()
        tracker = Tracker.from_options(config.tracking, run.path, config.model_dump(mode="json"), total_steps)
        step = saver.resume(tracker)
        last = not config.train.max_seconds and step >= total_steps
        started = time.monotonic()
        while not last:
            step_started = time.monotonic()
            done, total = _progress(config, step, total_steps, started)
            rate = learning_rate(
                done, total, config.actor.adam.lr, config.actor.lr_warmup_ratio * total, config.actor.min_lr_ratio,
                config.actor.lr_scheduler,
            )  # fmt: skip
            ctc_only = step < config.sft.ctc_warmup_steps
            metrics = saver.attempt(step + 1, partial(policy.sft_update, loader.next_batch(), rate, ctc_only))
            policy.forget()
            step += 1
            done, total = _progress(config, step, total_steps, started)
            last = done >= total
            step_s = time.monotonic() - step_started
            metrics |= {"time/step_s": step_s, "train/tokens_per_s": metrics.get("train/tokens", 0.0) / step_s}
            if sets and config.eval.steps and (last or step % config.eval.steps == 0):
                metrics |= evaluate_sets(policy, sets, config.eval, seed=config.train.seed)
            metrics |= feature_cache_metrics(config.data, policy)
            if last:
                stages.check_encoder(facts, policy.describe())
            metrics |= saver.watch.look(step, metrics) | saver.timings()
            tracker.log(step, metrics)
            if last or step % max(1, config.tracking.sample_steps) == 0:
                tracker.progress_line(step, metrics)
            saver.after_step(step, metrics, last)
    tracker.close()
    return saver.result


def _progress(config: SftConfig, step: int, total_steps: int, started: float) -> tuple[float, float]:
    """(done, total) in steps, or in seconds with --train.max_seconds."""
    if config.train.max_seconds:
        return time.monotonic() - started, config.train.max_seconds
    return step, total_steps
