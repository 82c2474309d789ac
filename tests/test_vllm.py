"""The vLLM engine is the policy: the same log-probs as transformers, before and after a sync of changed weights."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import torch

from speechrl.data.manifest import read_manifest
from speechrl.launch import cluster
from speechrl.models.tiny import build_qwen2_audio, build_qwen3_asr, build_speech_lm
from speechrl.rollout.engine import Completion, Sampled, Sampling
from speechrl.rollout.vllm import VllmServer
from speechrl.sections import RayOptions, Vllm
from speechrl.training.policy import PolicyRank
from speechrl.training.weight_sync import Route, buckets, engine_name, send_host
from speechrl.types import Prompt, Utterance

from .conftest import CHARACTERS
from .test_update import make_config, policy_rank
from .tiny_families import BUILDERS

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="policy and engine would share a GPU; see test_gpu.py"),
]
OPTIONS = Vllm(max_model_len=256, max_audio_tokens=40, enforce_eager=True)  # some batches take several waves
# vLLM's attention on the CPU wants heads of 32: these widths have them
MODELS = {
    "qwen3_asr tied": lambda path: build_qwen3_asr(path, CHARACTERS, width=160, encoder_layers=1, decoder_layers=2),
    "qwen2_audio untied": lambda path: build_qwen2_audio(path, CHARACTERS, width=128),
    # a language model that may only sample its speech tokens: a mask in place of a bias on banned ids
    "speech_lm tied": lambda path: build_speech_lm(path, CHARACTERS, ["turn", "on"], 64, width=160),
}


class Server:
    """An engine in a Ray actor (vLLM stands one a process), called as if it were here."""

    def __init__(self, *arguments, num_gpus: int = 0):
        self.actor = ray.remote(VllmServer).options(num_gpus=num_gpus).remote(*arguments)

    def __getattr__(self, method: str):
        return lambda *arguments: ray.get(getattr(self.actor, method).remote(*arguments))

    def stream(self, *arguments) -> Iterator[Sampled]:
        return map(ray.get, self.actor.stream.options(num_returns="streaming").remote(*arguments))


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    with cluster(RayOptions(), 1, 1):
        yield


@pytest.fixture(scope="module", params=MODELS)
def pair(
    request, tmp_path_factory, noise_manifest: str, ray_cluster: None
) -> Iterator[tuple[PolicyRank, Server, list[Utterance]]]:
    """A policy rank in this process and an engine that has its weights."""
    path = tmp_path_factory.mktemp("vllm") / "model"
    MODELS[request.param](path)
    config = make_config(str(path), noise_manifest)
    if request.param.startswith("speech"):
        config = config.model_copy(update={"data": config.data.model_copy(update={"speech_style": "llasa"})})
    rank = policy_rank(config)
    server = Server(rank.engine_spec(OPTIONS, sleeps=False), OPTIONS, 0)
    sync(rank, server)
    utterances = read_manifest(noise_manifest)[:5]
    yield rank, server, utterances
    ray.kill(server.actor)


def sync(rank: PolicyRank, server: Server, trained_only: bool = False) -> list[str]:
    """Send the rank's weights through the host; returns their names to the engine."""
    server.start_update()
    names, route = [], Route([server.actor], timeout_s=120.0, is_sender=True)
    for weights in buckets(rank.module, rank.family, trained_only, 1 << 16):
        send_host(weights, route)
        names += [name for name, _ in weights]
    route.raise_fault()
    server.finish_update(rank.weights_version)
    return names


def shake(rank: PolicyRank, part: str) -> None:
    """Move the trained weights whose name contains `part`, as an optimiser step would."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        moved = [p for name, p in rank.module.named_parameters() if p.requires_grad and part in name]
        assert moved
        for parameter in moved:
            parameter.add_((0.05 * torch.randn(parameter.shape, generator=generator)).to(parameter))
    rank.weights_version += 1


def complete(
    rank: PolicyRank, server: Server, utterances: list[Utterance], sampling: Sampling
) -> list[tuple[Prompt, list[Completion]]]:
    """What the engine answers, in the order of the utterances."""
    found = {}
    for sampled in server.stream(sampling, rank.engine_inputs(utterances)):
        found |= dict(zip(sampled.places, sampled.groups, strict=True))
    return [found[place] for place in range(len(utterances))]


def gap(rank: PolicyRank, server: Server, utterances: list[Utterance], temperature: float) -> float:
    """Mean absolute difference (nats per token) between the engine's and the trainer's log-probs."""
    sampling = Sampling(num_samples=4, temperature=temperature, max_new_tokens=12, step=rank.weights_version)
    assert server.describe()["weights_version"] == rank.weights_version
    groups = rank.groups_of(complete(rank, server, utterances, sampling), rank.weights_version)
    ours = rank.logprobs(groups, temperature or 1.0, rank.config.train)
    differences = [
        abs(mine - theirs)
        for group, rows in zip(groups, ours, strict=True)
        for rollout, row in zip(group.rollouts, rows, strict=True)
        for mine, theirs in zip(row, rollout.logprobs, strict=True)
    ]
    return sum(differences) / len(differences)


def greedy(rank: PolicyRank, server: Server, utterances: list[Utterance]) -> tuple[list, list]:
    """Greedy token ids of the engine and of the policy's own forward pass."""
    sampling = Sampling(temperature=0.0, max_new_tokens=12)
    sampled = complete(rank, server, utterances, sampling)
    native = rank.generate(utterances, sampling)
    return [group[0].token_ids for _, group in sampled], [group.rollouts[0].token_ids for group in native]


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_logprobs_equal_the_trainers(pair, temperature: float) -> None:
    assert gap(*pair, temperature) < 1e-5


def test_greedy_text_equals_the_policys_also_after_a_sync(pair) -> None:
    rank, server, _ = pair
    before, native = greedy(*pair)
    assert before == native
    shake(rank, "")
    stale, native = greedy(*pair)
    assert stale != native  # the engine has the old weights, and the test can tell
    sync(rank, server, trained_only=True)
    after, native = greedy(*pair)
    assert after == native and after != before
    assert gap(*pair, 1.0) < 1e-5


def test_a_projectors_change_needs_no_sync(pair) -> None:
    rank, _, _ = pair
    if not rank.family.has_audio:
        pytest.skip("text has no projector")
    before, _ = greedy(*pair)
    shake(rank, "projector")
    rank.forget()
    after, native = greedy(*pair)
    assert after == native and after != before


def test_samples_differ_within_a_group_and_repeat_with_the_seed(pair) -> None:
    rank, server, utterances = pair
    sampling = Sampling(num_samples=4, max_new_tokens=12, seed=1)
    first, again = (complete(rank, server, utterances, sampling) for _ in range(2))
    assert [[item.token_ids for item in group] for _, group in first] == [
        [item.token_ids for item in group] for _, group in again
    ]
    assert all(len({item.token_ids for item in group}) > 1 for _, group in first)


def test_banned_ids_are_never_sampled_and_stops_are_kept(pair) -> None:
    rank, server, utterances = pair
    sampling = Sampling(num_samples=64, temperature=2.0, max_new_tokens=24)
    sampled = complete(rank, server, utterances, sampling)
    items = [item for _, group in sampled for item in group]
    assert not {token for item in items for token in item.token_ids} & set(rank.builder.banned_ids)
    reasons = {"stop": 0, "length": 0}
    for item in items:
        reasons[item.finish_reason] += 1
        ends = item.token_ids[-1] in rank.builder.stop_ids
        assert ends == (item.finish_reason == "stop") and (ends or len(item.token_ids) == 24)
    assert min(reasons.values()) > 0


def test_a_prompt_that_is_too_long_names_the_utterance(pair) -> None:
    rank, server, utterances = pair
    with pytest.raises(ValueError, match=rf"prompt of {utterances[0].id} has \d+ tokens; .*--vllm.max_model_len 256"):
        complete(rank, server, utterances, Sampling(max_new_tokens=250))


def check_before_and_after_a_sync(rank: PolicyRank, server: Server, utterances: list[Utterance], limit: float) -> None:
    """The engine has the rank's log-probs, and its greedy text once its changed weights are sent."""
    sync(rank, server)
    assert gap(rank, server, utterances, 1.0) < limit
    shake(rank, "")
    sync(rank, server, trained_only=True)
    assert gap(rank, server, utterances, 0.7) < limit
    after, native = greedy(rank, server, utterances)
    assert after == native


def test_an_engine_cut_over_two_processes_is_the_policy(ray_cluster: None, noise_manifest: str, tmp_path: Path) -> None:
    MODELS["qwen3_asr tied"](tmp_path / "model")
    rank = policy_rank(make_config(str(tmp_path / "model"), noise_manifest))
    options = OPTIONS.model_copy(update={"tensor_parallel_size": 2})
    server = Server(rank.engine_spec(options, sleeps=False), options, 0)
    check_before_and_after_a_sync(rank, server, read_manifest(noise_manifest)[:5], 1e-5)
    ray.kill(server.actor)


# one that scales what it adds and says, and one whose class is no causal language model to transformers
@pytest.mark.parametrize("family", ["granite_speech", "qwen2_5_omni"])
def test_other_language_models_are_the_policy(
    family: str, ray_cluster: None, noise_manifest: str, tmp_path: Path
) -> None:
    BUILDERS[family](tmp_path / "model", 128)
    rank = policy_rank(make_config(str(tmp_path / "model"), noise_manifest))
    options = OPTIONS.model_copy(update={"max_model_len": 512, "max_audio_tokens": 400})
    server = Server(rank.engine_spec(options, sleeps=False), options, 0)
    check_before_and_after_a_sync(rank, server, read_manifest(noise_manifest)[:5], 1e-5)
    ray.kill(server.actor)


def test_names_are_those_of_a_language_models_checkpoint(pair, tmp_path: Path) -> None:
    rank, _, _ = pair
    names = [engine_name(name, rank.family) for name, _ in rank.module.named_parameters()]
    sent = {name for name in names if name}
    assert all(name.startswith(("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head.")) for name in sent)
    projector = [name for name, _ in rank.module.named_parameters() if "projector" in name]
    assert names.count(None) == len(projector)
