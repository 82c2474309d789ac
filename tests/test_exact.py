"""One policy rank in this process: what a checkpoint holds is all that the next step depends on, and a step that is not
finite changes nothing.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from speechrl.config import SftConfig
from speechrl.data.manifest import read_manifest
from speechrl.faults import RunError, StepRefused
from speechrl.ports import free_socket_port
from speechrl.sections import Actor, Adam, Data, Ds, Sft, Train
from speechrl.training import memory, streams
from speechrl.training.batch import Row
from speechrl.training.deepspeed_engine import whole_state
from speechrl.training.policy import Place, PolicyRank
from speechrl.types import TrainGroup

from .test_update import make_config, policy_rank, sampled


def everything(rank: PolicyRank) -> dict[str, torch.Tensor]:
    """Weights and optimiser state, as they are in memory."""
    found = {name: value.clone() for name, value in whole_state(rank.engine).items()}
    inner = getattr(rank.engine.optimizer, "optimizer", rank.engine.optimizer)
    for number, state in enumerate(inner.state.values()):
        found |= {f"{number}.{name}": torch.as_tensor(value).clone() for name, value in state.items()}
    return found


def assert_same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    assert one.keys() == two.keys()
    different = [name for name in one if not torch.equal(one[name], two[name])]
    assert different == []


@pytest.mark.parametrize(
    ("stage", "dtype"), [(0, "fp32"), (1, "fp32"), (2, "fp32"), (3, "fp32"), (0, "bf16"), (1, "bf16"), (3, "bf16")]
)
def test_a_step_that_is_not_finite_changes_nothing(stage: int, dtype: str, qwen3_asr: str, noise_manifest: str) -> None:
    """An advantage beyond float32 makes the loss infinite; after the refusal the next step is as if it had not been."""
    good = sampled(qwen3_asr, noise_manifest)
    bad = [TrainGroup(good[0].group, (1e39, *good[0].advantages[1:]), good[0].ref_logprobs), *good[1:]]
    config = make_config(qwen3_asr, noise_manifest, micro_batch_size=4)
    config = config.model_copy(update={"ds": Ds(zero_stage=stage, param_dtype=dtype)})
    spoilt, plain = policy_rank(config), policy_rank(config)
    for rank in (spoilt, plain):
        rank.update([good], 1e-2)
    before = everything(spoilt)
    with pytest.raises(StepRefused, match=r"the loss of samples n0 is not finite; optimiser step 2 was refused"):
        spoilt.update([bad], 1e-2)
    assert_same(before, everything(spoilt))
    assert spoilt.weights_version == 1
    assert spoilt.update([good], 1e-2)["train/grad_norm"] == plain.update([good], 1e-2)["train/grad_norm"]
    assert_same(everything(spoilt), everything(plain))


def test_a_gradient_that_is_not_finite_names_the_step_s_samples(qwen3_asr: str, noise_manifest: str) -> None:
    groups = sampled(qwen3_asr, noise_manifest)
    rank = policy_rank(make_config(qwen3_asr, noise_manifest))
    before = everything(rank)
    weight = next(parameter for parameter in rank.module.parameters() if parameter.requires_grad)
    handle = weight.register_hook(lambda grad: grad * float("inf"))
    with pytest.raises(StepRefused, match=r"the gradient of samples n0, n2, n4, n6 is not finite"):
        rank.update([groups], 1e-2)
    handle.remove()
    assert_same(before, everything(rank))


def sft_rank(model: str, manifest: str, stage: int) -> PolicyRank:
    """Trains everything, with dropout, so that a step depends on the rank's random stream."""
    config = SftConfig(
        actor=Actor(model_name_or_path=model, device="cpu", adam=Adam(lr=1e-2), freeze=()),
        data=Data(prompt_dataset=(manifest,)),
        ds=Ds(zero_stage=stage, param_dtype="fp32"),
        train=Train(batch_size=4, seed=5),
        sft=Sft(label_language=True),
    )
    rank = PolicyRank(config, Place(0, 1, "127.0.0.1", free_socket_port()))
    for layer in rank.module.modules():
        if hasattr(layer, "attention_dropout"):
            layer.attention_dropout = 0.2
    return rank


@pytest.mark.parametrize("stage", [0, 2])
def test_a_restored_rank_goes_on_bit_for_bit(stage: int, qwen3_asr: str, noise_manifest: str, tmp_path: Path) -> None:
    utterances = read_manifest(noise_manifest)
    batches = [utterances[start : start + 4] for start in (0, 4, 8, 0)]
    rank = sft_rank(qwen3_asr, noise_manifest, stage)
    for batch in batches[:2]:
        rank.sft_update(batch, 1e-2)
    rank.save_checkpoint(str(tmp_path))
    after = [rank.sft_update(batch, 1e-2) for batch in batches[2:]]
    draws = (random.random(), float(np.random.random()), float(torch.rand(())))
    other = sft_rank(qwen3_asr, noise_manifest, stage)
    other.load_checkpoint(str(tmp_path))
    assert [other.sft_update(batch, 1e-2) for batch in batches[2:]] == after
    assert (random.random(), float(np.random.random()), float(torch.rand(()))) == draws
    assert_same(everything(rank), everything(other))
    assert other.weights_version == 4
    # the random stream matters: without it the third step is another
    third = sft_rank(qwen3_asr, noise_manifest, stage)
    third.load_checkpoint(str(tmp_path))
    streams.seed(77)
    assert third.sft_update(batches[2], 1e-2)["train/loss"] != after[0]["train/loss"]


def test_a_checkpoint_that_would_run_code_is_refused(qwen3_asr: str, noise_manifest: str, tmp_path: Path) -> None:
    rank = sft_rank(qwen3_asr, noise_manifest, 2)
    rank.save_checkpoint(str(tmp_path))
    path = next((tmp_path / "deepspeed").glob("*model_states.pt"))
    state = torch.load(path, weights_only=False)
    torch.save(state | {"module": print}, path)
    with pytest.raises(Exception, match="Weights only load failed"):
        rank.load_checkpoint(str(tmp_path))


def test_out_of_memory_names_the_micro_batch_and_what_to_lower(qwen3_asr: str, noise_manifest: str) -> None:
    groups = sampled(qwen3_asr, noise_manifest)
    rank = policy_rank(make_config(qwen3_asr, noise_manifest, micro_batch_size=4))
    weight = next(parameter for parameter in rank.module.parameters() if parameter.requires_grad)

    def full(grad: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    weight.register_hook(full)
    with pytest.raises(RunError) as caught:
        rank.update([groups], 1e-2)
    told = str(caught.value)
    assert "a micro-batch of 4 completions of 1 prompts" in told and "samples n0" in told
    assert "23 response tokens" in told  # 12 + 1 + 7 + 3
    assert "lower --train.micro_batch_size" in told and "2.00 GiB" in told


def test_out_of_memory_while_encoding_is_told(
    qwen3_asr: str, noise_manifest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = policy_rank(make_config(qwen3_asr, noise_manifest))

    def full(features: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(rank.module, "encode", full)
    with pytest.raises(RunError, match=r"out of GPU memory while encoding 2 clips .*55 frames: lower --data\.max_dur"):
        rank.encode(rank.prepare(read_manifest(noise_manifest)[:2]))


def test_a_micro_batch_in_words() -> None:
    assert memory.describe("scoring", []).startswith("scoring a micro-batch of 0 completions of 0 prompts")
    row = Row("u", (1, 2, 3), (4, 5))
    assert "2 completions of 1 prompts (3 prompt tokens, 4 response tokens, longest row 5; samples u)" in (
        memory.describe("scoring", [row, row])
    )
