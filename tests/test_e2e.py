"""Whole runs on real Ray and DeepSpeed, in the processes that a user starts."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
import yaml

from speechrl.data.audio import write_wav
from speechrl.data.manifest import write_manifest
from speechrl.models.load import load_model
from speechrl.models.tiny import build_qwen3_asr
from speechrl.ports import free_socket_port
from speechrl.speech.vq import NUM_MELS, VqCodec

from .conftest import CHARACTERS

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).parent.parent


def speechrl(*arguments: str, check: bool = True) -> subprocess.CompletedProcess:
    """Run a command as a user does; on failure show what it said."""
    done = subprocess.run(
        [sys.executable, "-m", "speechrl.cli", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert not check or done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def metrics_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def train_flags(model: str, manifest: str, out: Path, steps: int) -> list:
    return [
        "--actor.model_name_or_path", model, "--actor.device", "cpu", "--actor.adam.lr", "1e-3",
        "--data.prompt_dataset", manifest, "--ds.param_dtype", "fp32", "--ds.zero_stage", "2",
        "--rollout.batch_size", "4", "--rollout.n_samples_per_prompt", "4", "--rollout.max_new_tokens", "8",
        "--train.micro_batch_size", "5", "--train.max_steps", steps, "--reward.remote_url", "rewards/asr.py",
        "--ckpt.output_dir", out, "--tracking.sample_steps", "2",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def five_steps(qwen3_asr: str, noise_manifest: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five GRPO steps on two ranks: augmented audio, a reference, the reward over HTTP, two optimiser steps a batch, a
    checkpoint.
    """
    out = tmp_path_factory.mktemp("runs") / "five"
    port = str(free_socket_port())
    server = subprocess.Popen(
        [sys.executable, "-m", "speechrl.cli", "serve-reward", "rewards/asr.py", "--port", port], cwd=ROOT
    )
    try:
        wait_for(f"http://127.0.0.1:{port}/health")
        flags = train_flags(qwen3_asr, noise_manifest, out, 5)
        flags[flags.index("rewards/asr.py")] = f"http://127.0.0.1:{port}/get_reward"
        speechrl(
            "train", *flags, "--actor.num_ranks", "2",
            "--algo.kl.init_coef", "0.05", "--train.batch_size", "8", "--train.max_epochs", "2",
            "--eval.dataset", f"dev={noise_manifest}", "--eval.steps", "5", "--eval.max_new_tokens", "8",
            "--ckpt.save_steps", "4", "--tracking.profile_steps", "2",
            "--data.augment.speeds", "0.9", "1.1", "--data.augment.noise", "speech", "--data.augment.time_masks", "1",
        )  # fmt: skip
    finally:
        server.terminate()
        server.wait(30)
    return out


def wait_for(url: str) -> None:
    for _ in range(120):
        try:
            if httpx.get(url).is_success:
                return
        except httpx.TransportError:
            time.sleep(0.5)
    raise TimeoutError(url)


def test_five_steps_from_audio_to_export(five_steps: Path, qwen3_asr: str) -> None:
    lines = metrics_of(five_steps)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert [line["train/optimizer_steps"] for line in lines] == [4, 8, 12, 16, 20]
    for line in lines:
        assert line["gap/abs_mean_nats"] < 1e-4  # sampler and trainer are one policy in float32, and hear the same
        assert line["data/augmented_share"] == 1.0
        assert line["train/grad_norm"] > 0
        assert line["rollout/prompts"] == 4
    assert lines[0]["train/kl_nats"] < lines[-1]["train/kl_nats"]  # the policy leaves the reference
    assert lines[-1]["eval/dev/cer"] >= 0
    before, after = (
        load_model(qwen3_asr).model.state_dict(),
        load_model(str(five_steps / "hf" / "last")).model.state_dict(),
    )
    for name, tensor in before.items():
        same = torch.equal(tensor, after[name])
        assert same == name.startswith("model.audio_tower."), name  # the encoder is frozen, all else moved
    samples = (five_steps / "samples.jsonl").read_text().splitlines()
    assert len(samples) == 2 * 3  # two groups at steps 1, 3 and 5
    config = yaml.safe_load((five_steps / "config.yaml").read_text())
    assert config["algo"]["kl"]["init_coef"] == 0.05


def test_a_step_is_profiled(five_steps: Path) -> None:
    trace = json.loads((five_steps / "profile" / "step_2.json").read_text())
    names = {event.get("name") for event in trace["traceEvents"]}
    assert {"aten::scaled_dot_product_attention", "ChosenLogprobs", "Optimizer.step#AdamW.step"} <= names
    assert len(list((five_steps / "profile").iterdir())) == 1


def test_export_command_gives_the_checkpoint(five_steps: Path, tmp_path: Path) -> None:
    """`speechrl export` of step 4's checkpoint equals the hf export that the run wrote at step 4."""
    speechrl("export", "--checkpoint", five_steps / "checkpoints" / "step_4", "--out", tmp_path / "out")
    exported, written = (
        load_model(str(path)).model.state_dict() for path in (tmp_path / "out", five_steps / "hf" / "step_4")
    )
    assert all(torch.equal(tensor, written[name]) for name, tensor in exported.items())


LISTENING_REWARD = """
def reward_func(queries, prompts, labels, *, generated_audio, **kwargs):
    seconds = [0.0 if sound is None else sound.duration_s for sound in generated_audio]
    parts = {"short": [1 - value for value in seconds], "spoken": [float(value > 0) for value in seconds]}
    heard = ["turn on" if value > 0.2 else "" for value in seconds]
    return {"rewards": parts["short"], "parts": parts, "weights": {"short": 1.0, "spoken": 0.0}, "heard": heard}
"""


def test_a_model_that_speaks_trains_on_the_same_loop(speech_lm: str, tmp_path: Path) -> None:
    """Tokens, codec workers, a reward that listens, gdpo, evaluation of what was heard: three steps of all of it."""
    stream = np.random.default_rng(0)
    VqCodec(stream.normal(-3, 1, (64, 4 * NUM_MELS))).save(tmp_path / "codec")
    (tmp_path / "reward.py").write_text(LISTENING_REWARD)
    write_wav(tmp_path / "v.wav", (0.1 * stream.standard_normal(8000)).astype(np.float32), 16000)
    rows = [
        {"id": f"t{i}", "text": "turn on " + "abcdefgh"[i], "speaker_audio": "v.wav", "speaker_text": "check",
         "speaker_codes": [[i], [3]]}
        for i in range(8)
    ]  # fmt: skip
    write_manifest(tmp_path / "m.jsonl", rows)
    flags = train_flags(speech_lm, str(tmp_path / "m.jsonl"), tmp_path / "run", 3)
    flags[flags.index("rewards/asr.py")] = str(tmp_path / "reward.py")
    speechrl(
        "train", *flags, "--data.speech_style", "llasa", "--codec.name_or_path", tmp_path / "codec",
        "--algo.advantage.estimator", "gdpo", "--algo.overlong_buffer_len", "4",
        "--eval.dataset", f"dev={tmp_path / 'm.jsonl'}", "--eval.steps", "3", "--eval.max_new_tokens", "8",
        "--eval.temperature", "1", "--tracking.no_tensorboard",
    )  # fmt: skip
    lines = metrics_of(tmp_path / "run")
    for line in lines:
        assert line["gap/abs_mean_nats"] < 1e-4 and line["train/grad_norm"] > 0
        assert 0.04 <= line["rollout/speech_mean_s"] <= 8 * 0.04  # frames of 40 ms, eight tokens at most
        assert line["reward/part/spoken/mean"] == pytest.approx(1 - line["rollout/invalid_share"])
        assert -1 <= line["reward/part/overlong/mean"] <= 0 and line["time/decode_s"] > 0
        assert "rollout/cer" not in line
    assert 0 <= lines[-1]["eval/dev/cer"] <= 1 and lines[-1]["eval/dev/part/spoken"] <= 1
    sounds = list((tmp_path / "run" / "audio").glob("step_*/t*.wav"))
    assert 0 < len(sounds) <= 2 * 2 * 4  # two tables of two groups of four


def test_a_reward_that_raises_stops_the_run_and_names_the_sample(causal_lm: str, tmp_path: Path) -> None:
    """The other bad answers (wrong count, NaN, strings) are in test_plugin.py; this is what the user sees of any."""
    (tmp_path / "bad.py").write_text(
        "def reward_func(queries, prompts, labels):\n    raise RuntimeError('no model here')\n"
    )
    (tmp_path / "m.jsonl").write_text(
        "\n".join(json.dumps({"prompt": f"{i} ->", "text": "1"}) for i in range(5)) + "\n"
    )
    flags = train_flags(causal_lm, str(tmp_path / "m.jsonl"), tmp_path / "run", 1)
    flags[flags.index("rewards/asr.py")] = str(tmp_path / "bad.py")
    done = speechrl("train", *flags, check=False)
    assert done.returncode == 2
    assert "bad.py" in done.stderr and "no model here" in done.stderr and "m:" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM")
def test_vllm_samples_for_two_ranks(noise_manifest: str, tmp_path: Path) -> None:
    """Three steps with rollouts and evaluation by an engine: it stays the policy, from step to step."""
    build_qwen3_asr(tmp_path / "model", CHARACTERS, width=160, encoder_layers=1, decoder_layers=2)
    flags = train_flags(str(tmp_path / "model"), noise_manifest, tmp_path / "run", 3)
    flags[flags.index("2")] = "3"  # ZeRO 3: the weights are gathered for each sync
    speechrl(
        "train", *flags, "--actor.num_ranks", "2", "--rollout.engine", "vllm", "--vllm.enforce_eager",
        "--vllm.max_model_len", "256", "--eval.dataset", f"dev={noise_manifest}", "--eval.steps", "3",
        "--eval.max_new_tokens", "8", "--algo.correction.method", "tis", "--tracking.no_tensorboard",
    )  # fmt: skip
    lines = metrics_of(tmp_path / "run")
    assert len(lines) == 3
    for line in lines:
        assert line["gap/abs_mean_nats"] < 1e-3
        assert line["train/grad_norm"] > 0
        assert line["train/corrected_share"] == 0  # ratios are 1
        assert line["sync/megabytes"] > 0.5
    speechrl(
        "eval", "--model", tmp_path / "run" / "hf" / "last", "--eval.dataset", f"dev={noise_manifest}",
        "--eval.max_new_tokens", "8", "--actor.device", "cpu", "--output_dir", tmp_path / "eval",
    )  # fmt: skip
    native = json.loads((tmp_path / "eval" / "summary.json").read_text())["models"]["last"]["sets"]["dev"]["metrics"]
    assert native["cer"]["value"] == pytest.approx(lines[-1]["eval/dev/cer"], rel=1e-6)  # the same greedy texts
