"""Two ranks equal one: loss, gradient norm and updated weights, for uneven lengths and every ZeRO stage."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from speechrl.config import Actor, Adam, Algo, Data, Ds, RayOptions, Reward, Rollout, Train, TrainConfig
from speechrl.launch import cluster, start_policy, stop
from speechrl.models.load import load_processor, read_family
from speechrl.types import Group, Prompt, TrainGroup, Utterance
from speechrl.types import Rollout as Sample

pytestmark = pytest.mark.e2e


def groups_of(path: str) -> list[TrainGroup]:
    """Five groups of four completions, lengths from 1 to 23 tokens, one abstention."""
    tokenizer = load_processor(path, read_family(path)[1])
    generator = torch.Generator().manual_seed(3)
    groups = []
    for index in range(5):
        utterance = Utterance(f"u{index}", "1 2", prompt="9 8 7 ->"[: 3 + index], where=f"test:{index}")
        ids = tuple(tokenizer(utterance.prompt, add_special_tokens=False).input_ids)
        samples, advantages = [], []
        for sample in range(4):
            length = int(torch.randint(1, 24, (1,), generator=generator))
            tokens = tuple(torch.randint(12, len(tokenizer), (length,), generator=generator).tolist())
            samples.append(Sample(tokens, (-3.5,) * length, "length", 0, "", ""))
            advantages.append(None if (index, sample) == (1, 2) else float(torch.randn((), generator=generator)))
        groups.append(TrainGroup(Group(Prompt(utterance, ids, utterance.prompt), tuple(samples)), tuple(advantages)))
    return groups


def run(path: str, num_ranks: int, stage: int, micro: int, out: Path, device: str = "cpu") -> tuple[list[dict], dict]:
    config = TrainConfig(
        actor=Actor(
            model_name_or_path=path, num_ranks=num_ranks, adam=Adam(lr=1e-2, eps=1e-3), device=device, max_norm=0.05
        ),
        data=Data(prompt_dataset=("x",)),
        ds=Ds(zero_stage=stage, param_dtype="fp32"),
        rollout=Rollout(batch_size=5, n_samples_per_prompt=4),
        train=Train(micro_batch_size=micro),
        reward=Reward(remote_url=("x.py",)),
        algo=Algo(),
        ray=RayOptions(),
    )
    groups = groups_of(path)
    policy = start_policy(config)
    # the second step goes over two mini-batches, so old log-probs are recomputed and clipping is live
    metrics = [policy.update([groups], 1e-2), policy.update([groups[:2], groups[2:]], 1e-2)]
    policy.export(str(out))
    stop(policy)
    return metrics, load_file(out / "model.safetensors")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks_equal_one(stage: int, causal_lm: str, tmp_path: Path, ray_session: None) -> None:
    one, weights_one = run(causal_lm, 1, stage, 20, tmp_path / "one")
    two, weights_two = run(causal_lm, 2, stage, 3, tmp_path / "two")
    before = load_file(Path(causal_lm) / "model.safetensors")
    for first, second in zip(one, two, strict=True):
        for name in ("train/loss", "train/grad_norm", "train/entropy_nats", "train/clip_fraction", "gap/abs_mean_nats"):
            assert second[name] == pytest.approx(first[name], rel=1e-5, abs=1e-9), name
    for name, tensor in weights_one.items():
        moved = (tensor - before[name]).norm()
        assert moved > 0, name
        assert (tensor - weights_two[name]).norm() / moved < 1e-4, name
        assert (tensor - weights_two[name]).norm() / tensor.norm() < 1e-5, name


@pytest.fixture(scope="module")
def ray_session():
    with cluster(RayOptions(), 4):
        yield
