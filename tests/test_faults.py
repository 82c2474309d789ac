"""Whole runs in which something goes wrong: nothing is lost, and a resumed run is the one that nothing happened to."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from speechrl.config import ReplayConfig
from speechrl.models.load import load_model
from speechrl.replay import replay
from speechrl.training.checksums import fault_of

from .test_e2e import ROOT, metrics_of, speechrl, train_flags

pytestmark = pytest.mark.e2e
NOT_COMPARED = ("time/", "train/tflops_per_rank", "rollout/tokens_per_s", "train/tokens_per_s")

# A reward that draws from the driver's random stream: a resumed run must go on in it.
NOISY_REWARD = """
import random


def reward_func(queries, prompts, labels, responses):
    shared = [len(set(response) & set(label)) for response, label in zip(responses, labels)]
    return {"rewards": [number + 0.1 * random.random() for number in shared]}
"""


def killed(victim: str, point: str, number: int, *arguments) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "tests.killed", victim, point, str(number), *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def comparable(run: Path) -> list[dict]:
    return [
        {name: value for name, value in line.items() if not name.startswith(NOT_COMPARED)} for line in metrics_of(run)
    ]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_model(str(folder)).model.state_dict()


def test_killed_anywhere_and_resumed_is_bit_for_bit_the_whole_run(
    qwen3_asr: str, noise_manifest: str, tmp_path: Path
) -> None:
    """The driver is killed while ranks sample, while they update and while they write a checkpoint; then the newest
    checkpoint loses a bit. Two ranks, ZeRO 2, several optimiser steps a batch, evaluation with a best metric.
    """
    (tmp_path / "noisy.py").write_text(NOISY_REWARD)
    flags = train_flags(qwen3_asr, noise_manifest, tmp_path / "whole", 5)
    flags[flags.index("rewards/asr.py")] = str(tmp_path / "noisy.py")
    flags += [
        "--actor.num_ranks", "2", "--train.batch_size", "8", "--ckpt.save_steps", "1", "--ckpt.max_num", "3",
        "--eval.dataset", f"dev={noise_manifest}", "--eval.steps", "2", "--eval.best_metric", "eval/dev/cer",
        "--eval.max_new_tokens", "8", "--tracking.save_rollouts", "--tracking.no_tensorboard",
    ]  # fmt: skip
    speechrl("train", *flags)
    parts, whole = tmp_path / "parts", tmp_path / "whole"
    flags[flags.index(whole)] = parts
    assert killed("driver", "stream", 2, "train", *flags).returncode == -9  # in step 2
    assert killed("driver", "update", 2, "train", *flags, "--ckpt.resume").returncode == -9  # resumes at 2, in step 3
    # resumes after step 2, and dies in the checkpoint of step 4
    assert killed("driver", "save_checkpoint", 2, "train", *flags, "--ckpt.resume").returncode == -9
    newest = parts / "checkpoints" / "step_3"
    assert fault_of(newest) == "" and not (parts / "checkpoints" / "step_4").exists()
    victim = next((newest / "deepspeed").glob("*optim_states.pt"))
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    said = speechrl("train", *flags, "--ckpt.resume").stdout
    assert f"step_3 is damaged (the checksum of deepspeed/{victim.name} is not the one that was written)" in said
    assert f"resumed from {parts / 'checkpoints' / 'step_2'}" in said

    assert comparable(parts) == comparable(whole)
    assert [line["train/grad_norm"] > 0 for line in metrics_of(whole)] == [True] * 5
    for link in ("last", "best"):
        assert (parts / "hf" / link).readlink() == (whole / "hf" / link).readlink()
        one, two = weights(whole / "hf" / link), weights(parts / "hf" / link)
        assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())
    assert (parts / "samples.jsonl").read_bytes() == (whole / "samples.jsonl").read_bytes()
    for step in range(1, 6):
        name = f"rollouts/step_{step}.jsonl.gz"
        assert (parts / name).read_bytes() == (whole / name).read_bytes(), step
    states = [json.loads((run / "checkpoints" / "step_5" / "state.json").read_text()) for run in (whole, parts)]
    assert states[0] == states[1]  # loader, best values, the driver's random streams
    assert sorted(path.name for path in (parts / "checkpoints").iterdir()) == [
        "step_3", "step_3.damaged", "step_4", "step_5"
    ]  # fmt: skip


# Call 1 is the trial before training, then each step has two, one for the groups of each rank. A reward of step 2 is a
# number that float32 can't hold; step 4 fails.
FAULTY_REWARD = """
from pathlib import Path

calls = [0]


def reward_func(queries, prompts, labels):
    calls[0] += 1
    rewards = [float(len(query) % 5) for query in queries]
    mended = Path(__file__).with_name("mended").exists()
    if calls[0] == 4 and not mended:
        rewards[0] = 1e39
    if calls[0] == 8 and not mended:
        raise RuntimeError("no model here")
    return {"rewards": rewards}
"""


def test_what_is_refused_fails_or_dies_is_told_and_nothing_is_lost(causal_lm: str, tmp_path: Path) -> None:
    """Step 2 has an infinite loss and is left out; in step 4 the reward fails, and step 3 is saved although no
    checkpoint was due; resumed, a rank is killed in step 5.
    """
    (tmp_path / "faulty.py").write_text(FAULTY_REWARD)
    rows = [{"id": f"s{i}", "prompt": f"{i} {9 - i} ->", "text": f"{i}"} for i in range(9)]
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    run = tmp_path / "run"
    flags = train_flags(causal_lm, str(tmp_path / "m.jsonl"), run, 6)
    flags[flags.index("rewards/asr.py")] = str(tmp_path / "faulty.py")
    flags += [
        "--actor.num_ranks", "2", "--ckpt.save_steps", "100", "--algo.advantage.estimator", "dr_grpo",
        "--train.max_skipped_steps", "1", "--tracking.no_tensorboard", "--tracking.save_rollouts",
    ]  # fmt: skip
    done = speechrl("train", *flags, check=False)
    assert done.returncode == 2 and "no model here" in done.stderr
    assert "warning: step 2: the loss of samples s" in done.stdout and "was refused" in done.stdout
    assert [line["train/refused"] for line in metrics_of(run)] == [0, 1, 0]
    assert "saved step 3 before the run stops: --ckpt.resume continues there" in done.stdout
    assert fault_of(run / "checkpoints" / "step_3") == ""

    (tmp_path / "mended").touch()
    steps = replay(ReplayConfig(run=str(run)))
    assert [step.changed_rewards for step in steps] == [0, 1, 0]
    for step in steps[::2]:
        assert step.loss == pytest.approx(step.logged_loss, abs=1e-5)  # one optimiser step, on-policy

    done = killed("1", "update", 2, "train", *flags, "--ckpt.resume")
    assert done.returncode == 1, done.stderr[-2000:]
    assert "speechrl train: a rank is gone, killed or out of memory" in done.stderr
    assert "Traceback" not in done.stderr.partition("speechrl train:")[2]
    assert [line["step"] for line in metrics_of(run)] == [1, 2, 3, 4]
    assert fault_of(run / "checkpoints" / "step_3") == ""
