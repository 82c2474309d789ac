"""What only a GPU can show: bf16 training on CUDA, and two ranks over NCCL equal to one."""

from __future__ import annotations

import contextlib
import importlib.util
import json
from pathlib import Path

import pytest
import ray
import torch
from safetensors.torch import load_file

from speechrl.data.manifest import read_manifest
from speechrl.faults import RunError
from speechrl.launch import cluster, start_policy, stop
from speechrl.models.attention import FLEX_BLOCK
from speechrl.models.load import load_model
from speechrl.models.policy import PolicyModule
from speechrl.models.prompts import PromptBuilder
from speechrl.models.tiny import build_qwen3_asr
from speechrl.rollout.engine import Share
from speechrl.sections import RayOptions, Runtime, Selection, Vllm
from speechrl.training.batch import Packing, Row, collate, rows_of
from speechrl.training.inference import InferenceRank

from .conftest import CHARACTERS, talkative
from .test_e2e import metrics_of, speechrl, train_flags
from .test_ranks import config_of, groups_of
from .test_shared_prefix import check_compiled_logprobs
from .test_update import make_config, policy_rank, sampled
from .test_vllm import Server, check_before_and_after_a_sync

pytestmark = [pytest.mark.gpu, pytest.mark.e2e]


def cuda_flags(model: str, manifest: str, out: Path, steps: int) -> list:
    """Of a run in bf16 on GPUs."""
    flags = train_flags(model, manifest, out, steps)
    flags[flags.index("cpu")], flags[flags.index("fp32")] = "cuda", "bf16"
    return flags


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_bf16_training_with_a_reference_on_one_gpu(qwen3_asr: str, noise_manifest: str, tmp_path: Path) -> None:
    flags = cuda_flags(qwen3_asr, noise_manifest, tmp_path / "run", 3)
    speechrl("train", *flags, "--algo.kl.init_coef", "0.05", "--tracking.no_tensorboard")
    for line in metrics_of(tmp_path / "run"):
        assert line["gap/abs_mean_nats"] < 0.02
        assert line["train/grad_norm"] > 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_shared_prompts_in_bf16_are_within_its_noise(noise_manifest: str, tmp_path: Path) -> None:
    """Against float32 on the same weights they err no more than repeated prompts do."""
    build_qwen3_asr(tmp_path / "silent", CHARACTERS, width=320, encoder_layers=1, decoder_layers=4)
    model = str(talkative(tmp_path / "silent", tmp_path / "model", gain=1.5))
    rows = rows_of(sampled(model, noise_manifest))
    exact = logprobs_and_gradient(model, noise_manifest, rows, Packing(shared_prefix=False), "fp32")
    ways = {
        "repeated": Packing(shared_prefix=False, multiple=8),
        "shared, sdpa": Packing(multiple=8),
        "shared, flex": Packing(one_sequence=True, multiple=FLEX_BLOCK),
    }
    errors = {}
    for way, packing in ways.items():
        found = logprobs_and_gradient(model, noise_manifest, rows, packing, "bf16")
        errors[way] = [float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]
    print(f"relative L2 error of (log-probs, gradient): {errors}")
    for way in ("shared, sdpa", "shared, flex"):
        for error, noise in zip(errors[way], errors["repeated"], strict=True):
            assert error < 1.5 * noise < 0.1, errors


def logprobs_and_gradient(
    model: str, manifest: str, rows: list[Row], packing: Packing, dtype: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """([N], [all weights that train]) in float32, of the sum of log-probs weighted by the advantages."""
    loaded = load_model(model, dtype)
    for parameter in loaded.model.parameters():
        parameter.data = parameter.data.bfloat16().to(parameter.dtype)  # the same weights in both
    loaded.model.to("cuda")
    builder = PromptBuilder(loaded, "", False)
    module = PolicyModule(loaded, builder.banned_ids)
    if packing.one_sequence:
        module.use_flex_attention()
    prepared = [builder.prepare(item) for item in read_manifest(manifest)[:7:2]]
    encoded = module.encode([item.features for item in prepared])
    audio = dict(zip((item.prompt.utterance.id for item in prepared), encoded, strict=True))
    batch = collate(rows, audio, builder.pad_id, "cuda", packing)
    logprobs_BR = module(batch)[0]
    advantages_B = torch.tensor([row.advantage for row in rows], device="cuda")
    (logprobs_BR * advantages_B[:, None]).sum().backward()
    gradients = [item.grad.float().flatten() for item in module.parameters() if item.grad is not None]
    return logprobs_BR.detach().float(), torch.cat(gradients)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("temperature", "with_entropy"), [(1.0, True), (0.7, False)])
def test_compiled_logprobs_on_cuda(
    temperature: float, with_entropy: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_compiled_logprobs("cuda", dtype, temperature, with_entropy, monkeypatch)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_outputs_of_the_cache_read_ahead_are_the_encoders(qwen3_asr: str, noise_manifest: str, tmp_path: Path) -> None:
    utterances = read_manifest(noise_manifest)[:6]
    found = []
    for _ in ("written", "read"):
        data = Selection(feature_cache=str(tmp_path / "cache"))
        rank = InferenceRank(qwen3_asr, Runtime(device="cuda"), data, "bf16")
        rank.look_ahead(utterances)
        found.append(rank.encoded(utterances))
    assert rank.num_encoder_passes == 0
    for utterance in utterances:
        first, second = (outputs[utterance.id] for outputs in found)
        assert second.is_cuda and torch.equal(first, second)


class LendingRank(InferenceRank):
    def num_bytes(self) -> int:
        return torch.cuda.memory_allocated()


class Hearing:
    """An engine's end of what a rank lends."""

    def take(self, share: Share) -> tuple[bool, torch.Tensor]:
        assert share.audio_RH is not None
        return share.audio_RH.is_cuda, share.audio_RH.cpu()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_audio_stays_on_the_gpu_that_rank_and_engine_share(qwen3_asr: str, noise_manifest: str) -> None:
    utterances = read_manifest(noise_manifest)[:6]
    with cluster(RayOptions(), 2):
        place = {"num_cpus": 1, "num_gpus": 0.5}
        rank = ray.remote(LendingRank).options(**place).remote(qwen3_asr, Runtime(device="cuda"), Selection(), "bf16")
        engine = ray.remote(Hearing).options(**place).remote()
        on_host = [ray.get(rank.engine_inputs.remote(part)).audio_RH for part in (utterances[:4], utterances[4:])]
        held = []
        for number in range(6):  # each is lent when the one before may be gone
            part = utterances[:4] if number % 2 == 0 else utterances[4:]
            is_cuda, found = ray.get(engine.take.remote(rank.engine_inputs.remote(part, same_gpu=True)))
            assert is_cuda and torch.equal(found, on_host[number % 2])
            held.append(ray.get(rank.num_bytes.remote()))
        assert held[5] - held[1] < 2 * on_host[1].nbytes  # four more were lent: what was read is given back


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_native_rollouts_beside_flex_attention(noise_manifest: str, tmp_path: Path) -> None:
    build_qwen3_asr(tmp_path / "silent", CHARACTERS, width=320, encoder_layers=1, decoder_layers=2)
    model = str(talkative(tmp_path / "silent", tmp_path / "model", gain=1.5))
    flags = cuda_flags(model, noise_manifest, tmp_path / "run", 3)
    speechrl("train", *flags, "--train.packed_attention", "flex", "--tracking.no_tensorboard")
    for line in metrics_of(tmp_path / "run"):
        assert line["gap/abs_mean_nats"] < 0.02
        assert line["train/grad_norm"] > 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_full_gpu_names_the_micro_batch_and_what_to_lower(noise_manifest: str, tmp_path: Path) -> None:
    build_qwen3_asr(tmp_path / "model", CHARACTERS, width=320, encoder_layers=1, decoder_layers=2)
    model = str(tmp_path / "model")
    groups = sampled(model, noise_manifest)
    config = make_config(model, noise_manifest, packed_attention="sdpa")
    rank = policy_rank(config.model_copy(update={"actor": config.actor.model_copy(update={"device": "cuda"})}))
    rank.update([groups], 1e-3)  # the optimiser's state is there, and the encoder's outputs
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
    ballast = []
    for size in (1 << 20, 1 << 16, 1 << 9):
        with contextlib.suppress(torch.OutOfMemoryError):
            while True:
                ballast.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    del ballast[:8]  # enough for the step's few numbers, not for a forward pass
    try:
        with pytest.raises(RunError, match=r"(?s)out of GPU memory while training on.*16 completions of 4 prompts.*"):
            rank.update([groups], 1e-3)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def vllm_flags(model: Path, manifest: str, out: Path, steps: int) -> list:
    """Of a run in bf16 on GPUs with vLLM, on a model whose heads its kernels take."""
    build_qwen3_asr(model / "untrained", CHARACTERS, width=320, encoder_layers=1, decoder_layers=2)
    talkative(model / "untrained", model / "talkative", gain=1.5)  # an untrained one hides stale weights
    flags = cuda_flags(str(model / "talkative"), manifest, out, steps)
    return [
        *flags, "--rollout.engine", "vllm", "--vllm.max_model_len", "256", "--vllm.enforce_eager",
        "--vllm.gpu_memory_utilization", "0.3", "--tracking.no_tensorboard",
    ]  # fmt: skip


needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM")


@pytest.mark.vllm
@needs_vllm
@pytest.mark.parametrize(("transfer", "num_gpus"), [("nccl", 1), ("nccl", 2), ("host", 1)])
def test_vllm_in_bf16_on_gpus_of_its_own(transfer: str, num_gpus: int, noise_manifest: str, tmp_path: Path) -> None:
    if torch.cuda.device_count() < 1 + num_gpus:
        pytest.skip(f"needs {1 + num_gpus} CUDA devices")
    flags = vllm_flags(tmp_path / "model", noise_manifest, tmp_path / "run", 3)
    speechrl("train", *flags, "--vllm.sync_transfer", transfer, "--vllm.tensor_parallel_size", num_gpus)
    for line in metrics_of(tmp_path / "run"):
        assert line["gap/abs_mean_nats"] < 0.02
        assert line["sync/megabytes"] > 0.5


@pytest.mark.vllm
@needs_vllm
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("temperature", "stage"), [("0.7", "1"), ("1.0", "2"), ("1.3", "2")])
def test_vllm_and_policy_take_turns_on_one_gpu(
    temperature: str, stage: str, noise_manifest: str, tmp_path: Path
) -> None:
    flags = vllm_flags(tmp_path / "model", noise_manifest, tmp_path / "run", 2)
    flags[flags.index("--ds.zero_stage") + 1] = stage
    flags += [
        "--train.colocate_all", "--rollout.temperature", temperature, "--ckpt.save_steps", "1",
        "--eval.dataset", f"dev={noise_manifest}", "--eval.steps", "1", "--eval.max_new_tokens", "8",
    ]  # fmt: skip
    speechrl("train", *flags)
    flags[flags.index("--train.max_steps") + 1] = "4"
    speechrl("train", *flags, "--ckpt.resume")
    lines = metrics_of(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    for line in lines:
        assert line["gap/abs_mean_nats"] < 0.02
        assert line["time/wake_s"] > 0 and line["time/release_s"] > 0 and line["sync/megabytes"] > 0.5
        assert line["train/grad_norm"] > 0


@pytest.mark.vllm
@needs_vllm
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_vllm_evaluates_beside_its_rank_on_one_gpu(noise_manifest: str, tmp_path: Path) -> None:
    """In float32 its greedy texts are native's: the corpus metrics are equal."""
    build_qwen3_asr(tmp_path / "silent", CHARACTERS, width=320, encoder_layers=1, decoder_layers=2)
    model, found = talkative(tmp_path / "silent", tmp_path / "model"), {}
    for engine in ("native", "vllm"):
        out = tmp_path / engine
        speechrl(
            "eval", "--model", f"m={model}", "--eval.dataset", f"dev={noise_manifest}", "--eval.max_new_tokens", "8",
            "--eval.engine", engine, "--vllm.max_model_len", "256", "--vllm.enforce_eager",
            "--vllm.gpu_memory_utilization", "0.3", "--output_dir", out,
        )  # fmt: skip
        found[engine] = json.loads((out / "summary.json").read_text())["models"]["m"]["sets"]["dev"]["metrics"]
    assert found["native"] == found["vllm"]


@pytest.mark.vllm
@needs_vllm
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_colocated_ranks_with_a_reference(noise_manifest: str, tmp_path: Path) -> None:
    flags = vllm_flags(tmp_path / "model", noise_manifest, tmp_path / "run", 3)
    speechrl(
        "train", *flags, "--train.colocate_all", "--actor.num_ranks", "2", "--vllm.num_engines", "2",
        "--algo.kl.init_coef", "0.05",
    )  # fmt: skip
    for line in metrics_of(tmp_path / "run"):
        assert line["gap/abs_mean_nats"] < 0.02
        assert line["train/grad_norm"] > 0


@pytest.mark.vllm
@needs_vllm
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_an_engine_cut_over_two_gpus_is_the_policy(noise_manifest: str, tmp_path: Path) -> None:
    build_qwen3_asr(tmp_path / "model", CHARACTERS, width=320, encoder_layers=1, decoder_layers=2)
    config = make_config(str(tmp_path / "model"), noise_manifest)
    rank = policy_rank(config.model_copy(update={"actor": config.actor.model_copy(update={"device": "cuda"})}))
    options = Vllm(max_model_len=256, enforce_eager=True, tensor_parallel_size=2, gpu_memory_utilization=0.2)
    with cluster(RayOptions(), 1, 1):
        server = Server(rank.engine_spec(options, sleeps=False), options, 0, num_gpus=2)
        check_before_and_after_a_sync(rank, server, read_manifest(noise_manifest)[:5], 1e-3)


def run(path: str, num_ranks: int, stage: int, micro: int, out: Path) -> tuple[list[dict], dict]:
    groups = groups_of(path)
    policy = start_policy(config_of(path, num_ranks, stage, micro, device="cuda"))
    metrics = [policy.update([groups], 1e-2), policy.update([groups[:2], groups[2:]], 1e-2)]
    policy.export(str(out))
    stop(policy)
    return metrics, load_file(out / "model.safetensors")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_two_gpus_equal_one(stage: int, causal_lm: str, tmp_path: Path) -> None:
    with cluster(RayOptions(), 4):
        one, weights_one = run(causal_lm, 1, stage, 20, tmp_path / "one")
        two, weights_two = run(causal_lm, 2, stage, 3, tmp_path / "two")
    for first, second in zip(one, two, strict=True):
        for name in ("train/loss", "train/grad_norm", "train/entropy_nats"):
            assert second[name] == pytest.approx(first[name], rel=1e-4, abs=1e-7), name
    for name, tensor in weights_one.items():
        assert (tensor - weights_two[name]).norm() / tensor.norm() < 1e-4, name
