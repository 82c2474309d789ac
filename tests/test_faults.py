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


def kill_flags(model: str, manifest: str, folder: Path, run: Path) -> list:
    """Of a run of two ranks, ZeRO 2, two optimiser steps a batch, evaluated with a best metric, and a random reward."""
    (folder / "noisy.py").write_text(NOISY_REWARD)
    flags = train_flags(model, manifest, run, 4)
    flags[flags.index("rewards/asr.py")] = str(folder / "noisy.py")
    return [
        *flags, "--actor.num_ranks", "2", "--train.batch_size", "8", "--ckpt.save_steps", "1", "--ckpt.max_num", "3",
        "--eval.dataset", f"dev={manifest}", "--eval.steps", "2", "--eval.best_metric", "eval/dev/cer",
        "--eval.max_new_tokens", "8", "--tracking.save_rollouts", "--tracking.no_tensorboard",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def whole(qwen3_asr: str, noise_manifest: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole")
    speechrl("train", *kill_flags(qwen3_asr, noise_manifest, folder, folder / "run"))
    assert [line["train/grad_norm"] > 0 for line in metrics_of(folder / "run")] == [True] * 4
    return folder / "run"


def check_equal(parts: Path, whole: Path) -> None:
    """Metrics, exports, samples, rollouts and the last checkpoint's state, bit for bit."""
    assert comparable(parts) == comparable(whole)
    for link in ("last", "best"):
        assert (parts / "hf" / link).readlink() == (whole / "hf" / link).readlink()
        one, two = weights(whole / "hf" / link), weights(parts / "hf" / link)
        assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())
    assert (parts / "samples.jsonl").read_bytes() == (whole / "samples.jsonl").read_bytes()
    for step in range(1, 5):
        name = f"rollouts/step_{step}.jsonl.gz"
        assert (parts / name).read_bytes() == (whole / name).read_bytes(), step
    states = [json.loads((run / "checkpoints" / "step_4" / "state.json").read_text()) for run in (whole, parts)]
    assert states[0] == states[1]  # loader, best values, the driver's random streams


@pytest.mark.parametrize("point", ["stream", "update"])
def test_killed_and_resumed_is_bit_for_bit_the_whole_run(
    point: str, whole: Path, qwen3_asr: str, noise_manifest: str, tmp_path: Path
) -> None:
    """The driver is killed in step 2, while ranks sample or while they update."""
    run = tmp_path / "run"
    flags = kill_flags(qwen3_asr, noise_manifest, tmp_path, run)
    assert killed("driver", point, 2, "train", *flags).returncode == -9
    said = speechrl("train", *flags, "--ckpt.resume").stdout
    assert f"resumed from {run / 'checkpoints' / 'step_1'}" in said
    check_equal(run, whole)


def test_killed_while_it_saves_and_then_a_flipped_bit(
    whole: Path, qwen3_asr: str, noise_manifest: str, tmp_path: Path
) -> None:
    """The driver is killed in the checkpoint of step 3, and the newest one, of step 2, loses a bit."""
    run = tmp_path / "run"
    flags = kill_flags(qwen3_asr, noise_manifest, tmp_path, run)
    assert killed("driver", "save_checkpoint", 3, "train", *flags).returncode == -9
    newest = run / "checkpoints" / "step_2"
    assert fault_of(newest) == "" and not (run / "checkpoints" / "step_3").exists()
    victim = next((newest / "deepspeed").glob("*optim_states.pt"))
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    said = speechrl("train", *flags, "--ckpt.resume").stdout
    assert f"step_2 is damaged (the checksum of deepspeed/{victim.name} is not the one that was written)" in said
    assert f"resumed from {run / 'checkpoints' / 'step_1'}" in said
    check_equal(run, whole)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        "step_2", "step_2.damaged", "step_3", "step_4"
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
