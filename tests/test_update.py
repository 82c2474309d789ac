"""One policy rank in this process: what an update does must not depend on how its rows are cut, ordered or padded."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from speechrl.config import TrainConfig
from speechrl.data.manifest import read_manifest
from speechrl.ports import free_socket_port
from speechrl.rollout.engine import Sampling
from speechrl.sections import Actor, Adam, Advantage, Algo, Data, Ds, Kl, Reward, Rollout, Train
from speechrl.training.policy import Place, PolicyRank
from speechrl.types import Group, TrainGroup


def make_config(model: str, manifest: str, **changes) -> TrainConfig:
    algo = changes.pop("algo", Algo(advantage=Advantage()))
    return TrainConfig(
        actor=Actor(model_name_or_path=model, device="cpu", adam=Adam(lr=1e-2, eps=1e-3), max_norm=1e9),
        data=Data(prompt_dataset=(manifest,)),
        ds=Ds(zero_stage=1, param_dtype="fp32"),
        rollout=Rollout(batch_size=4, n_samples_per_prompt=4, max_new_tokens=12),
        reward=Reward(remote_url=("x.py",)),
        train=Train(**changes),
        algo=algo,
    )


def policy_rank(config: TrainConfig) -> PolicyRank:
    return PolicyRank(config, Place(0, 1, "127.0.0.1", free_socket_port()))


def sampled(model: str, manifest: str) -> list[TrainGroup]:
    """Four groups of uneven lengths on four different clips, with made-up advantages and reference log-probs."""
    rank = policy_rank(make_config(model, manifest))
    groups = rank.generate(read_manifest(manifest)[:7:2], Sampling(num_samples=4, max_new_tokens=12, seed=3))
    cut = [
        replace(rollout, token_ids=rollout.token_ids[:size], logprobs=rollout.logprobs[:size])
        for rollout, size in zip([r for g in groups for r in g.rollouts], [12, 1, 7, 3] * 4, strict=True)
    ]
    groups = [Group(group.prompt, tuple(cut[4 * i : 4 * i + 4])) for i, group in enumerate(groups)]
    generator = torch.Generator().manual_seed(1)
    return [
        TrainGroup(
            group,
            tuple(torch.randn(4, generator=generator).tolist()),
            tuple(tuple(value - 0.3 for value in rollout.logprobs) for rollout in group.rollouts),
        )
        for group in groups
    ]


def updated(config: TrainConfig, groups: list[TrainGroup], steps: int = 1) -> tuple[dict, dict]:
    rank = policy_rank(config)
    size = len(groups) // steps
    metrics = rank.update([groups[i * size : (i + 1) * size] for i in range(steps)], 1e-2)
    return metrics, {name: value.detach().clone() for name, value in rank.module.state_dict().items()}


def assert_equal(one: tuple[dict, dict], two: tuple[dict, dict]) -> None:
    for name in ("train/loss", "train/grad_norm", "train/entropy_nats", "train/clip_fraction", "train/ratio_mean"):
        assert two[0][name] == pytest.approx(one[0][name], rel=1e-5, abs=1e-8), name
    for name, tensor in one[1].items():
        # the bias of an attention key moves by rounding alone: its gradient is 0
        assert (tensor - two[1][name]).norm() <= 1e-5 * tensor.norm() + 1e-8, name


@pytest.mark.parametrize(
    ("loss", "normalization", "kl"),
    [("ppo", "token", 0.0), ("ppo", "sequence", 0.1), ("gspo", "sequence", 0.0), ("reinforce", "constant", 0.1)],
)
def test_micro_batches_and_order_never_change_the_update(
    loss: str, normalization: str, kl: float, qwen3_asr: str, noise_manifest: str
) -> None:
    algo = Algo(policy_loss=loss, loss_normalization=normalization, kl=Kl(init_coef=kl))
    groups = sampled(qwen3_asr, noise_manifest)
    whole = updated(make_config(qwen3_asr, noise_manifest, algo=algo, micro_batch_size=16), groups)
    single = updated(make_config(qwen3_asr, noise_manifest, algo=algo, micro_batch_size=1), groups)
    mixed = updated(make_config(qwen3_asr, noise_manifest, algo=algo, micro_batch_size=3), groups[::-1])
    assert_equal(whole, single)
    assert_equal(whole, mixed)
    assert whole[0]["train/grad_norm"] > 0


def test_the_mean_of_micro_batch_means_would_be_another_update(qwen3_asr: str, noise_manifest: str) -> None:
    """The usual mistake, by hand: averaging each micro-batch over its own tokens gives another loss."""
    groups = sampled(qwen3_asr, noise_manifest)
    config = make_config(qwen3_asr, noise_manifest, micro_batch_size=1)
    loss = updated(config, groups)[0]["train/loss"]  # on-policy: the loss of a token is minus its advantage
    lengths = [len(rollout.token_ids) for item in groups for rollout in item.group.rollouts]
    advantages = [value for item in groups for value in item.advantages]
    global_mean = -sum(a * n for a, n in zip(advantages, lengths, strict=True)) / sum(lengths)
    mean_of_means = -sum(advantages) / len(advantages)
    assert loss == pytest.approx(global_mean, rel=1e-5)
    assert abs(mean_of_means - global_mean) > 0.01


def test_later_steps_clip_against_the_policy_before_the_first(qwen3_asr: str, noise_manifest: str) -> None:
    """Two optimiser steps and two epochs on one batch: old log-probs are those of the start, and clipping sets in."""
    groups = sampled(qwen3_asr, noise_manifest)
    config = make_config(qwen3_asr, noise_manifest, micro_batch_size=5, max_epochs=2)
    metrics, _ = updated(config, groups, steps=2)
    assert metrics["train/optimizer_steps"] == 4
    assert metrics["train/clip_fraction"] > 0.01
    assert metrics["gap/abs_mean_nats"] < 1e-5  # measured before the first step, so sampler and trainer agree
    assert_equal(
        (metrics, {}),
        (updated(make_config(qwen3_asr, noise_manifest, micro_batch_size=16, max_epochs=2), groups, 2)[0], {}),
    )


def test_abstained_rollouts_carry_no_gradient(qwen3_asr: str, noise_manifest: str) -> None:
    """A rollout without an advantage equals a rollout that was never there."""
    groups = sampled(qwen3_asr, noise_manifest)
    abstained = [replace(groups[0], advantages=(None, *groups[0].advantages[1:])), *groups[1:]]
    first = groups[0]
    absent = TrainGroup(
        Group(first.group.prompt, first.group.rollouts[1:]), first.advantages[1:], first.ref_logprobs[1:]
    )
    config = make_config(qwen3_asr, noise_manifest, micro_batch_size=4)
    assert_equal(updated(config, abstained), updated(config, [absent, *groups[1:]]))


def test_gradient_checkpointing_is_the_same_update(qwen3_asr: str, noise_manifest: str) -> None:
    groups = sampled(qwen3_asr, noise_manifest)
    config = make_config(qwen3_asr, noise_manifest)
    saving = config.model_copy(update={"actor": config.actor.model_copy(update={"gradient_checkpointing": True})})
    assert_equal(updated(config, groups), updated(saving, groups))


def test_bf16_micro_batches_add_up_in_fp32(qwen3_asr: str, noise_manifest: str) -> None:
    groups = sampled(qwen3_asr, noise_manifest)
    norms = {}
    for size in (16, 1):
        config = make_config(qwen3_asr, noise_manifest, micro_batch_size=size)
        rank = policy_rank(config.model_copy(update={"ds": Ds(zero_stage=2, param_dtype="bf16")}))
        norms[size] = rank.update([groups], 1e-2)["train/grad_norm"]
        assert rank.engine.optimizer.gradient_accumulation_dtype == torch.float32
    assert norms[1] == pytest.approx(norms[16], rel=0.02)


def test_a_gradient_of_exactly_zero_is_an_error(qwen3_asr: str, noise_manifest: str) -> None:
    groups = sampled(qwen3_asr, noise_manifest)
    rank = policy_rank(make_config(qwen3_asr, noise_manifest))
    for parameter in rank.module.parameters():
        if parameter.requires_grad:
            parameter.register_hook(torch.zeros_like)
    with pytest.raises(FloatingPointError, match="exactly 0"):
        rank.update([groups], 1e-2)


def test_the_encoder_runs_once_per_utterance_for_rollouts_and_training(qwen3_asr: str, noise_manifest: str) -> None:
    utterances = read_manifest(noise_manifest)[:4]
    rank = policy_rank(make_config(qwen3_asr, noise_manifest, max_epochs=2))
    before = rank.encoder_digest()
    groups = rank.generate(utterances, Sampling(num_samples=4, max_new_tokens=6))
    rank.update([[TrainGroup(group, (1.0, -1.0, 0.5, -0.5)) for group in groups]], 1e-2)
    assert rank.num_encoder_passes == len(utterances) == rank.builder.num_decoded
    assert rank.encoder_digest() == before
