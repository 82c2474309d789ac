"""Supervised fine-tuning on transcripts: the same ranks, data and exports as reinforcement learning."""

from __future__ import annotations

import time
from contextlib import ExitStack
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
from speechrl.training.fingerprint import resumable
from speechrl.training.group import feature_cache_metrics
from speechrl.training.run_folder import RunFolder

DEFAULT_BATCH_SIZE = 32  # utterances per optimiser step when --train.batch_size is 0


def sft(config: SftConfig) -> Path:
    """Returns the folder of the last export (or of the run, with --ckpt.no_save_hf)."""
    sources = read_sources(config.data)
    sets = read_sets(config.eval, config.data)
    loader = MixedLoader.from_options(
        sources, config.data, config.train.batch_size or DEFAULT_BATCH_SIZE, config.train.seed, "--train.batch_size"
    )
    preflight(config, {**dict(zip(config.data.prompt_dataset, sources, strict=True)), **sets})
    total_steps = config.train.max_steps or config.train.num_episodes * loader.num_batches_per_epoch
    run = RunFolder(config)
    found = resumable(config, run, loader)
    print(*check_resources(config), sep="\n", flush=True)
    with cluster(config.ray, config.actor.num_ranks), ExitStack() as stack:
        policy = start_policy(config, ctc_units(sources, config.sft.ctc_units) if config.sft.ctc_weight else None)
        facts = stages.announce(policy.describe()[0])
        saver = Saver(config, run, policy, loader, facts["model_digest"], found)
        run.claim()
        known_steps = 0 if config.train.max_seconds else total_steps
        tracker = Tracker.from_options(config.tracking, run.path, config.model_dump(mode="json"), known_steps)
        step = saver.resume(tracker)
        last = ended(config, step, total_steps, saver)
        started = time.monotonic()
        alone = projector_steps(config)
        begin = float(min(step, alone))  # progress at the end of the projector's own phase
        stack.enter_context(saver.rescuing())
        while not last:
            step_started = time.monotonic()
            done, total = _progress(config, step, total_steps, started)
            begin = done if step <= alone else begin
            rates = rates_of(config, step, done - begin, total - begin)
            utterances = loader.next_batch()
            if config.data.prefetch and (config.train.max_seconds or step + 1 < total_steps):
                policy.look_ahead(loader.upcoming())
            ctc_only = step < config.sft.ctc_warmup_steps
            metrics = saver.attempt(step + 1, partial(policy.sft_update, utterances, *rates, ctc_only))
            metrics |= stages.augmentation_metrics(config.data, utterances)
            policy.forget()
            step += 1
            done, total = _progress(config, step, total_steps, started)
            last = done >= total
            step_s = time.monotonic() - step_started
            metrics |= {"time/step_s": step_s, "train/tokens_per_s": metrics.get("train/tokens", 0.0) / step_s}
            if sets and config.eval.steps and not ctc_only and (last or step % config.eval.steps == 0):
                metrics |= evaluate_sets(policy, sets, config.eval, seed=config.train.seed)
            metrics |= feature_cache_metrics(config.data, policy)
            if saver.runs_stale(metrics, config.sft.patience):
                print(f"step {step}: {config.eval.best_metric} has stopped improving", flush=True)
                last = True
            if last:
                stages.check_encoder(facts, policy.describe())
            metrics |= saver.watch.look(step, metrics) | saver.timings()
            tracker.log(step, metrics)
            if last or step % max(1, config.tracking.sample_steps) == 0:
                tracker.progress_line(step, metrics)
            saver.after_step(step, metrics, last)
    tracker.close()
    return saver.result


def ended(config: SftConfig, step: int, total_steps: int, saver: Saver) -> bool:
    """Whether a run that starts, or goes on, at `step` has nothing left to do."""
    if config.sft.patience and saver.num_stale >= config.sft.patience:
        print(
            f"step {step}: {config.eval.best_metric} had stopped improving; raise --sft.patience to go on", flush=True
        )
        return True
    return not config.train.max_seconds and step >= total_steps


def projector_steps(config: SftConfig) -> int:
    """Optimiser steps at the start in which the projector learns alone: where the CTC loss listens to it, those of CTC
    alone too, for weight decay would else move what has no gradient.
    """
    listens = "encoder" in config.actor.freeze
    return max(config.sft.projector_only_steps, config.sft.ctc_warmup_steps * listens)


def rates_of(config: SftConfig, step: int, done: float, total: float) -> tuple[float, float]:
    """Learning rates of (everything but the projector, the projector) at optimiser step `step`.

    done, total: of what follows the steps in which the projector warms up on its own.
    """
    actor, alone = config.actor, projector_steps(config)
    peak = config.sft.projector_lr or actor.adam.lr
    if step < alone:
        return 0.0, learning_rate(step, alone, peak, actor.lr_warmup_ratio * alone, 1.0, "constant")
    warmup = actor.lr_warmup_ratio * total
    rest = learning_rate(done, total, actor.adam.lr, warmup, actor.min_lr_ratio, actor.lr_scheduler)
    warmup = 0.0 if alone else warmup  # warm already
    return rest, learning_rate(done, total, peak, warmup, actor.min_lr_ratio, actor.lr_scheduler)


def _progress(config: SftConfig, step: int, total_steps: int, started: float) -> tuple[float, float]:
    """(done, total) in steps, or in seconds with --train.max_seconds."""
    if config.train.max_seconds:
        return time.monotonic() - started, config.train.max_seconds
    return step, total_steps
