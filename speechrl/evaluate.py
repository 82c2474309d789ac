"""Decoding of held-out sets; the same numbers in training and in `speechrl eval`."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from speechrl.config import EvalConfig, named_paths
from speechrl.data.text_rules import read_rules
from speechrl.disk import check_writable, write_lines, writing
from speechrl.evaluation.alignment import write_alignment
from speechrl.evaluation.groups import parts_of, read_sets
from speechrl.evaluation.hypotheses import HYPOTHESES, decoded, write_hypotheses
from speechrl.evaluation.metrics import Samples, edit_totals, rates, rates_with_intervals
from speechrl.evaluation.speech import write_speech
from speechrl.launch import cluster, evaluation_engine, num_beside_ranks
from speechrl.models.feature_cache import check_feature_cache
from speechrl.models.load import read_family
from speechrl.models.speech_prompts import spoken_reference
from speechrl.reward.client import RewardClient
from speechrl.rollout.engine import RolloutEngine, Sampling
from speechrl.rollout.vllm_api import require_vllm
from speechrl.sections import Decoding
from speechrl.training.group import feature_cache_metrics
from speechrl.types import Group, Prompt, Rollout, Scores, Utterance

CHUNK = 1024  # utterances whose features are in memory at once


def sampling_of(options: Decoding, seed: int) -> Sampling:
    """How evaluation decodes."""
    return Sampling(
        num_samples=options.n_samples,
        temperature=options.temperature,
        max_new_tokens=options.max_new_tokens,
        batch_size=options.batch_size,
        seed=seed,
        num_beams=options.num_beams,
    )


def decode(
    engine: RolloutEngine, utterances: Sequence[Utterance], options: Decoding, seed: int
) -> tuple[list[Group], float]:
    """(transcripts of every utterance, seconds)."""
    groups: list[Group] = []
    started = time.monotonic()
    for start in range(0, len(utterances), CHUNK):
        groups += engine.generate(utterances[start : start + CHUNK], sampling_of(options, seed))
        engine.forget()
    return groups, time.monotonic() - started


def samples_of(groups: Sequence[Group], options: Decoding, reward: RewardClient | None) -> list[Samples]:
    """The transcripts with their rewards, if there is one."""
    book = read_rules(options.text_rules, "--eval.text_rules")
    scores: Sequence[Scores | None] = reward.score(groups) if reward is not None else [None] * len(groups)
    return [decoded(group, score, book) for group, score in zip(groups, scores, strict=True)]


def evaluate_sets(
    engine: RolloutEngine,
    sets: Mapping[str, Sequence[Utterance]],
    options: Decoding,
    reward: RewardClient | None = None,
    seed: int = 0,
) -> dict[str, float]:
    """Metrics of every named set as eval/NAME/METRIC, and of its parts as eval/NAME/KEY=VALUE/METRIC, with the newest
    weights.
    """
    started = time.monotonic()
    metrics: dict[str, float] = {}
    engine.sync()
    for name, utterances in sets.items():
        groups = samples_of(decode(engine, utterances, options, seed)[0], options, reward)
        parts = {f"{key}={value}/": part for key in options.group_by for value, part in parts_of(groups, key).items()}
        for place, part in {"": groups, **parts}.items():
            metrics |= {f"eval/{name}/{place}{metric}": value for metric, value in rates(part).items()}
    engine.release()
    return metrics | {"time/eval_s": time.monotonic() - started}


def evaluate_models(config: EvalConfig) -> dict:
    """`speechrl eval`: every model on every set. Writes summary.json and MODEL/SET/{hypotheses.jsonl, alignment.txt};
    returns what summary.json holds.
    """
    out = Path(config.output_dir)
    check_writable("--output_dir", out / "summary.json")
    sets = read_sets(config.eval, config.data)
    reward = RewardClient.from_options(config.reward) if config.reward.remote_url else None
    if reward is not None:
        reward.probe()
        first = next(iter(sets.values()))[0]
        reward.trial([_reference(first, config.data.speech_style)])  # a wrong path or token is told now
    models = named_paths(config.model, "--model")
    for path in models.values():
        _, family = read_family(path, config.actor.trust_remote_code)  # a wrong path is told before the ranks start
        check_feature_cache(config.data, family, here=not config.ray.address)
    for model, name in product(models, sets):
        check_writable("--output_dir", out / model / name / HYPOTHESES)
    if config.eval.engine == "vllm":
        require_vllm("--eval.engine")
    summary: dict = {
        "decoding": config.eval.model_dump(mode="json") | {"param_dtype": config.ds.param_dtype},
        "seed": config.seed,
        "models": {model: {"path": path, "sets": {}} for model, path in models.items()},
    }
    with (
        closing(reward) if reward else nullcontext(),
        cluster(config.ray, config.actor.num_ranks, num_beside_ranks(config)),
    ):
        for model, path in models.items():
            with evaluation_engine(config, path) as engine:
                engine.sync()
                for name, utterances in sets.items():
                    entry = _evaluate_set(engine, utterances, out / model / name, config, reward)
                    summary["models"][model]["sets"][name] = entry
                    with writing("--output_dir", out):  # what is done stays, whatever comes next
                        write_lines(out / "summary.json", [json.dumps(summary, indent=2, ensure_ascii=False)])
    return summary


def _evaluate_set(
    engine: RolloutEngine,
    utterances: Sequence[Utterance],
    folder: Path,
    config: EvalConfig,
    reward: RewardClient | None,
) -> dict:
    """Decode, write and summarise one set. The transcripts are on disk before a reward, which may fail, is asked."""
    groups, decode_s = decode(engine, utterances, config.eval, config.seed)
    samples = samples_of(groups, config.eval, None)
    with writing("--output_dir", folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_speech(folder, groups)
        write_hypotheses(folder / HYPOTHESES, samples)
    if reward is not None:
        samples = samples_of(groups, config.eval, reward)
    with writing("--output_dir", folder):
        if reward is not None:
            write_hypotheses(folder / HYPOTHESES, samples)
        write_alignment(folder / "alignment.txt", samples)
    ranks: Any = getattr(engine, "policy", engine)  # those that feed vLLM engines, or decode themselves
    entry = summarise(samples, decode_s, config.eval.group_by, config.seed)
    return entry | feature_cache_metrics(config.data, ranks)


def _reference(utterance: Utterance, speech_style: str) -> Group:
    """The reference as if the model had said it."""
    written = Rollout((), (), "stop", 0, utterance.text, utterance.text, utterance.language)
    said = spoken_reference(utterance) if speech_style else written
    return Group(Prompt(utterance, (), utterance.prompt or ""), (said,))


def summarise(groups: Sequence[Samples], decode_s: float, group_by: Sequence[str], seed: int) -> dict:
    """One set's entry in summary.json."""
    audio_s = sum(samples[0].utterance.duration_s or 0.0 for samples in groups)
    return {
        **_figures(groups, seed),
        "audio_s": round(audio_s, 3),
        "decode_s": round(decode_s, 3),
        "real_time_factor": round(decode_s / audio_s, 6) if audio_s else None,
        "breakdown": {
            key: {value: _figures(part, seed) for value, part in parts_of(groups, key).items()} for key in group_by
        },
    }


def _figures(groups: Sequence[Samples], seed: int) -> dict:
    metrics = {name: asdict(rate) for name, rate in rates_with_intervals(groups, seed).items()}
    return {"utterances": len(groups), "metrics": metrics, "counts": edit_totals(groups)}
