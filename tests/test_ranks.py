"""Two ranks equal one: loss, gradient norm and updated weights, for uneven lengths and every ZeRO stage."""

from __future__ import annotations

import pytest
import torch

from speechrl.config import TrainConfig
from speechrl.launch import cluster
from speechrl.models.load import load_processor, read_family
from speechrl.ports import free_address
from speechrl.sections import Actor, Adam, Algo, Data, Ds, RayOptions, Reward, Rollout, Train
from speechrl.training.deepspeed_engine import whole_state
from speechrl.training.group import spread
from speechrl.training.policy import Place, PolicyRank
from speechrl.types import Group, Prompt, TrainGroup, Utterance
from speechrl.types import Rollout as Sample

pytestmark = pytest.mark.e2e
STAGES = [0, 1, 2, 3]


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
        groups.append(
            TrainGroup(Group(Prompt(utterance, ids, utterance.prompt or ""), tuple(samples)), tuple(advantages))
        )
    return groups


def config_of(path: str, num_ranks: int, stage: int, micro: int, device: str = "cpu") -> TrainConfig:
    return TrainConfig(
        actor=Actor(
            model_name_or_path=path, num_ranks=num_ranks, adam=Adam(lr=1e-2, eps=1e-3), device=device, max_norm=0.05
        ),
        data=Data(prompt_dataset=("x",)),
        ds=Ds(zero_stage=stage, param_dtype="fp32"),
        rollout=Rollout(batch_size=5, n_samples_per_prompt=4),
        train=Train(micro_batch_size=micro),
        reward=Reward(remote_url=("x.py",)),
        algo=Algo(),
    )


class Runner:
    """A process that holds one rank after another, so that it starts once for all stages."""

    def __init__(self, place: Place):
        self.place = place

    def run(self, path: str, stage: int, micro: int) -> tuple[list[dict], dict]:
        """Metrics of two updates, and the weights after them. The second goes over two mini-batches, so that old
        log-probs are recomputed and clipping is live."""
        rank = PolicyRank(config_of(path, self.place.world_size, stage, micro), self.place)
        groups = groups_of(path)
        plans = [[groups], [groups[:1], groups[1:]]]  # a mini-batch of one group leaves a rank idle
        size = self.place.world_size
        shares = [[spread(part, {}, size)[self.place.rank] for part in plan] for plan in plans]
        return [rank.update(share, 1e-2) for share in shares], whole_state(rank.engine)


@pytest.fixture(scope="module")
def results(causal_lm: str) -> dict:
    """(number of ranks, stage) -> what the first rank says."""
    import ray

    with cluster(RayOptions(), 4):
        found = {}
        for num_ranks, micro in ((1, 20), (2, 3)):
            address, port = ray.get(ray.remote(free_address).remote())
            runner = ray.remote(Runner).options(num_cpus=1)
            ranks = [runner.remote(Place(rank, num_ranks, address, port)) for rank in range(num_ranks)]
            for stage in STAGES:
                found[num_ranks, stage] = ray.get([rank.run.remote(causal_lm, stage, micro) for rank in ranks])[0]
        return found


@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_equal_one(stage: int, results: dict, causal_lm: str) -> None:
    (one, weights_one), (two, weights_two) = results[1, stage], results[2, stage]
    for first, second in zip(one, two, strict=True):
        for name in ("train/loss", "train/grad_norm", "train/entropy_nats", "train/clip_fraction", "gap/abs_mean_nats"):
            assert second[name] == pytest.approx(first[name], rel=1e-5, abs=1e-9), name
    for name, tensor in weights_one.items():
        assert (tensor - weights_two[name]).norm() / tensor.norm() < 1e-5, name


@pytest.mark.parametrize("stage", STAGES[1:])
def test_every_stage_gives_the_same_weights(stage: int, results: dict) -> None:
    weights_0, weights_n = results[1, 0][1], results[1, stage][1]
    for name, tensor in weights_0.items():
        assert (tensor - weights_n[name]).norm() / tensor.norm() < 1e-5, name
