"""What can be known before training: the model, the data and the reward fit each other. `speechrl check`, and the start
of every train and sft.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

import torch

from speechrl.algorithms.advantages import GroupRewards
from speechrl.config import CheckConfig, Common, SftConfig, TrainConfig
from speechrl.data.checks import check_utterances
from speechrl.data.mix import MixedLoader, read_sources
from speechrl.evaluation.groups import read_sets
from speechrl.models.family import Family, language_name
from speechrl.models.feature_cache import check_feature_cache
from speechrl.models.load import LoadedModel, load_processor, read_family
from speechrl.models.prompts import PromptBuilder
from speechrl.models.resources import check_resources
from speechrl.models.speech_prompts import prompt_builder
from speechrl.reward.client import RewardClient
from speechrl.rollout.engine import EngineInput, check_length
from speechrl.rollout.vllm_api import require_vllm
from speechrl.sections import Data
from speechrl.settings import named_paths
from speechrl.tracking import check_backends
from speechrl.training.fingerprint import resumable
from speechrl.training.inference import pick_device
from speechrl.training.run_folder import RunFolder
from speechrl.training.weight_sync import engine_class
from speechrl.types import Group, Utterance

DECODED_SAMPLE = 100  # utterances decoded by `speechrl check` unless --whole


def preflight(config: Common, sets: dict[str, Sequence[Utterance]]) -> PromptBuilder:
    """Raises ValueError when the model folder and the manifests do not fit. Loads no weights; takes a second or two.

    sets: name -> utterances, of training and evaluation.
    """
    check_backends(config.tracking)
    if not config.ray.address:  # the ranks will run here
        pick_device(config.actor.device)
    if isinstance(config, TrainConfig) and config.rollout.engine == "vllm":
        require_vllm("--rollout.engine")
    builder = _read_builder(config, config.actor.model_name_or_path)
    family = builder.family
    if isinstance(config, TrainConfig) and config.algo.kl.init_coef and config.ref.model_name_or_path:
        _check_reference(builder, _read_builder(config, config.ref.model_name_or_path))
    if isinstance(config, TrainConfig) and config.rollout.engine == "vllm":
        shape, _ = read_family(config.actor.model_name_or_path, config.actor.trust_remote_code)
        engine_class(family.layout.read_config(shape) if family.layout.read_config else shape, family)
    check_feature_cache(config.data, family, here=not config.ray.address)
    if isinstance(config, SftConfig) and config.sft.ctc_weight and not family.has_audio:
        raise ValueError(f"--sft.ctc_weight {config.sft.ctc_weight} needs a model that hears: {family.name} does not")
    marks = tuple(set(builder.tokenizer.all_special_tokens) | set(family.output_tokens))
    flag = _language_flag(config, family)
    _check_slowing(config.data, builder)
    for utterances in sets.values():
        for utterance in utterances:
            builder.check_fit(utterance)
            _check_text(utterance, marks, family.has_audio)
            if flag and not utterance.language:
                raise ValueError(f"{utterance.where}: utterance {utterance.id} has no `language`; add it or use {flag}")
            if config.data.force_language and family.messages:  # a family may know some languages only
                family.messages(utterance, config.data.instruction, language_name(utterance.language))
    for utterances in sets.values():
        builder.prepare(utterances[0])
    if isinstance(config, TrainConfig) and config.rollout.engine == "vllm":
        _check_longest(config, sets, builder)
    _check_written(builder, config, next(iter(sets.values()))[0])
    return builder


def _check_longest(config: TrainConfig, sets: dict[str, Sequence[Utterance]], builder: PromptBuilder) -> None:
    """The engine must have room for the longest prompt of each set: better said now than in the middle of an epoch."""
    evaluated = named_paths(config.eval.dataset, "--eval.dataset")
    for name, utterances in sets.items():
        longest = max(utterances, key=lambda item: (item.duration_s or 0.0, len(item.prompt or "")))
        prompt = builder.prepare(longest).prompt
        new = config.eval.max_new_tokens if name in evaluated else config.rollout.max_new_tokens
        item = EngineInput(prompt, num_audio_rows=prompt.num_audio_tokens)
        check_length(item, new, config.vllm.max_model_len, config.vllm.max_audio_tokens)


def _check_written(builder: PromptBuilder, config: Common, utterance: Utterance) -> None:
    """An export holds the processor: written and read again it must make the same prompt and the same features."""
    with tempfile.TemporaryDirectory() as folder:
        builder.processor.save_pretrained(folder)
        again = _builder_of(
            load_processor(folder, builder.family, config.actor.trust_remote_code), builder.family, config
        )
    one, two = builder.prepare(utterance), again.prepare(utterance)
    same = one.prompt.token_ids == two.prompt.token_ids
    if one.features is not None and two.features is not None:
        same &= torch.equal(one.features.mel_MF, two.features.mel_MF)
    if not same:
        raise ValueError(
            f"model {config.actor.model_name_or_path}: its processor, written and read again, makes another prompt of "
            f"{utterance.id}, so an export would not be what was trained"
        )


def _read_builder(config: Common, path: str) -> PromptBuilder:
    _, family = read_family(path, config.actor.trust_remote_code)
    processor = load_processor(path, family, config.actor.trust_remote_code)
    return _builder_of(processor, family, config, path)


def _builder_of(processor: Any, family: Family, config: Common, path: str = "") -> PromptBuilder:
    loaded = LoadedModel(model=None, processor=processor, family=family, path=path)
    return prompt_builder(loaded, config.data)


def _check_reference(policy: PromptBuilder, reference: PromptBuilder) -> None:
    """The reference scores the policy's tokens, so both must mean the same by them."""
    if reference.family.name != policy.family.name:
        what = f"a {reference.family.name} model, the policy is {policy.family.name}"
    elif reference.tokenizer.get_vocab() != policy.tokenizer.get_vocab():
        what = "a model with another vocabulary than the policy's"
    else:
        return
    raise ValueError(f"--ref.model_name_or_path: {what}; the KL compares log-probs of the same tokens")


def _language_flag(config: Common, family: Family) -> str:
    """The flag that would do without `language`; empty where nothing asks for one."""
    if config.data.force_language:
        return "--data.no_force_language"
    labels = isinstance(config, SftConfig) and config.sft.label_language and family.prefill is not None
    return "--sft.no_label_language" if labels else ""


def _check_text(utterance: Utterance, marks: Sequence[str], prompt_too: bool) -> None:
    """Marks of the chat in a text would end an answer in its middle, or stand for audio."""
    texts = {"text": utterance.text, "language": utterance.language or ""}
    if prompt_too:  # a language model's prompt may be a chat that somebody templated
        texts["prompt"] = utterance.prompt or ""
    for key, text in texts.items():
        found = [mark for mark in marks if mark in text]
        if found:
            raise ValueError(
                f"{utterance.where}: utterance {utterance.id}: `{key}` contains {found[0]}, a special token of the "
                "model; take it out of the manifest"
            )


def _check_slowing(data: Data, builder: PromptBuilder) -> None:
    if min(data.augment.speeds, default=1.0) < 1 and data.max_duration_s > builder.max_audio_s:
        raise ValueError(
            f"--data.augment.speeds {min(data.augment.speeds)} makes audio longer, up to --data.max_duration_s "
            f"{data.max_duration_s:g}, and {builder.family.name} hears {builder.max_audio_s:g} s: set "
            f"--data.max_duration_s {builder.max_audio_s:g}"
        )


def check(config: CheckConfig) -> list[str]:
    """`speechrl check`: one line per thing that was verified. Raises ValueError at the first that is wrong."""
    lines = []
    run = RunFolder(config)  # may the run have its folder?
    sources = read_sources(config.data)
    loader = MixedLoader.from_options(
        sources, config.data, config.rollout.batch_size, config.train.seed, "--rollout.batch_size"
    )
    if found := resumable(config, run, loader):
        lines.append(f"checkpoint: {found[0]}")
    train = {f"training set {index + 1}": source for index, source in enumerate(sources)}
    sets: dict[str, Sequence[Utterance]] = {**train, **read_sets(config.eval, config.data)}
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
    client = RewardClient.from_options(config.reward)
    try:
        client.probe()
        lines.append(try_reward(client, builder, first, config))
    finally:
        client.close()
    lines += check_resources(config)
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
    if builder.allowed_ids:
        return f"speech tokens: {len(builder.allowed_ids) - 1}, and one that ends the speech"
    ids = builder.label_ids(utterance, with_language=bool(utterance.language))
    _, text, _ = builder.decode(ids[:-1], utterance)
    if text != utterance.text.strip():
        raise ValueError(
            f"{utterance.where}: the tokenizer turns the reference {utterance.text!r} into {text!r}: the model can't "
            "write it"
        )
    return f"tokenizer: gives {utterance.id}'s reference back ({len(ids)} tokens)"


def try_reward(client: RewardClient, builder: PromptBuilder, utterance: Utterance, config: TrainConfig) -> str:
    """Score the reference itself, with the family's tags, as if every sample of a group had said it; returns what the
    reward said of it.

    Raises RewardError for a reward that raises, or answers what is no reward, and ValueError for one that lacks what
    --algo.advantage.estimator reads: before training, not in its first step.
    """
    prompt = builder.prepare(utterance).prompt
    rollout = builder.reference(utterance)
    scores = client.trial([Group(prompt, (rollout,) * config.rollout.n_samples_per_prompt)])[0]
    GroupRewards.from_scores([scores], config.algo.advantage.estimator)
    parts = ", ".join(f"{name} {values[0]}" for name, values in scores.parts.items())
    if all(reward is None for reward in scores.rewards):
        return f"reward: WARNING, it abstains (None) for the reference of {utterance.id}; nothing is learnt from it"
    return f"reward: {scores.rewards[0]} for the reference of {utterance.id}" + (f" ({parts})" if parts else "")
