"""What can be known before training: the model, the data and the reward fit each other. `speechrl check`, and the start
of every train and sft.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from speechrl.config import CheckConfig, Common, named_paths
from speechrl.data.checks import check_utterances
from speechrl.data.mix import read_checked, read_sources
from speechrl.models.families import Family
from speechrl.models.load import LoadedModel, load_processor, read_family
from speechrl.models.prompts import PromptBuilder
from speechrl.reward.client import RewardClient
from speechrl.types import Group, Rollout, Utterance

DECODED_SAMPLE = 100  # utterances decoded by `speechrl check` unless --whole


def preflight(config: Common, sets: dict[str, Sequence[Utterance]]) -> PromptBuilder:
    """Raises ValueError when the model folder and the manifests do not fit. Loads no weights; takes a second or two.

    sets: name -> utterances, of training and evaluation.
    """
    model_config, family = read_family(config.actor.model_name_or_path, config.actor.trust_remote_code)
    del model_config
    processor = load_processor(config.actor.model_name_or_path, family, config.actor.trust_remote_code)
    for utterances in sets.values():
        _check_fit(family, utterances)
    loaded = LoadedModel(model=None, processor=processor, family=family, path=config.actor.model_name_or_path)
    builder = PromptBuilder(loaded, config.data.instruction, config.data.force_language)
    for utterances in sets.values():
        builder.prepare(utterances[0])
    return builder


def _check_fit(family: Family, utterances: Sequence[Utterance]) -> None:
    for utterance in utterances:
        if utterance.audio is not None and not family.has_audio:
            raise ValueError(
                f"{utterance.where}: utterance {utterance.id} has audio, but the model of --actor.model_name_or_path "
                f"({family.name}) has no audio encoder"
            )
        if utterance.audio is None and family.has_audio:
            raise ValueError(f"{utterance.where}: utterance {utterance.id} has no `audio`, which {family.name} needs")
        if utterance.duration_s is not None and utterance.duration_s > family.max_audio_s:
            raise ValueError(
                f"{utterance.where}: utterance {utterance.id} lasts {utterance.duration_s:.1f} s, {family.name} hears "
                f"{family.max_audio_s:.0f} s: set --data.max_duration_s {family.max_audio_s:.0f} --data.on_error skip"
            )


def check(config: CheckConfig) -> list[str]:
    """`speechrl check`: one line per thing that was verified. Raises ValueError at the first that is wrong."""
    lines = []
    train = {f"training set {index + 1}": source for index, source in enumerate(read_sources(config.data))}
    held_out = {
        name: read_checked(path, config.data)
        for name, path in named_paths(config.eval.dataset, "--eval.dataset").items()
    }
    sets: dict[str, Sequence[Utterance]] = {**train, **held_out}
    for name, utterances in sets.items():
        seconds = sum(utterance.duration_s or 0.0 for utterance in utterances)
        lines.append(f"{name}: {len(utterances)} utterances" + (f", {seconds / 3600:.2f} h" if seconds else ""))
    builder = preflight(config, sets)
    lines.append(f"model: {builder.family.name}, {len(builder.tokenizer)} tokens, stop ids {list(builder.stop_ids)}")
    if builder.family.has_audio:
        decoded = sum(_decode(utterances, config) for utterances in sets.values())
        lines.append(f"audio: {decoded} files decoded")
    first = next(iter(sets.values()))[0]
    lines.append(_round_trip(builder, first))
    lines.append(_try_reward(config, builder, first))
    out = Path(config.ckpt.output_dir)
    parent = next(path for path in (out, *out.resolve().parents) if path.exists())
    if not os.access(parent, os.W_OK):
        raise ValueError(f"--ckpt.output_dir {out}: {parent} is not writable")
    lines.append(f"output: {out} can be written")
    return lines


def _decode(utterances: Sequence[Utterance], config: CheckConfig) -> int:
    stride = 1 if config.whole else max(1, len(utterances) // DECODED_SAMPLE)
    chosen = list(utterances[::stride])
    check_utterances(
        chosen,
        min_duration_s=config.data.min_duration_s,
        max_duration_s=config.data.max_duration_s,
        on_error=config.data.on_error,
        decode=True,
    )
    return len(chosen)


def _round_trip(builder: PromptBuilder, utterance: Utterance) -> str:
    """The tokenizer must give a reference back, or rewards compare with something that can't be written."""
    ids = builder.label_ids(utterance, with_language=bool(utterance.language))
    _, text, _ = builder.decode(ids[:-1], utterance)
    if text != utterance.text.strip():
        raise ValueError(
            f"{utterance.where}: the tokenizer turns the reference {utterance.text!r} into {text!r}; the model of "
            "--actor.model_name_or_path can't write it"
        )
    return f"tokenizer: gives {utterance.id}'s reference back ({len(ids)} tokens)"


def _try_reward(config: CheckConfig, builder: PromptBuilder, utterance: Utterance) -> str:
    """Score the reference itself, as if every sample of a group had said it."""
    prompt = builder.prepare(utterance).prompt
    ids = builder.label_ids(utterance, with_language=False)
    rollout = Rollout(ids, (0.0,) * len(ids), "stop", 0, utterance.text, utterance.text, utterance.language)
    client = RewardClient.from_options(config.reward)
    try:
        client.probe()
        scores = client.score([Group(prompt, (rollout,) * config.rollout.n_samples_per_prompt)])[0]
    finally:
        client.close()
    parts = ", ".join(f"{name} {values[0]}" for name, values in scores.parts.items())
    return f"reward: {scores.rewards[0]} for the reference of {utterance.id}" + (f" ({parts})" if parts else "")
