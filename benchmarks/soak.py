"""A long run of tiny steps on the CPU, with the memory of its processes over time: does anything grow?

    python benchmarks/soak.py --out runs/soak --steps 300
    python benchmarks/soak.py --out runs/soak --rollout.engine vllm --vllm.enforce_eager --vllm.max_model_len 256

A random Qwen3-ASR of 160 hidden units on noise: 2 ranks, rollouts kept, a checkpoint and an evaluation every 25 steps;
further flags are those of `speechrl train`. Prints and writes (memory.json) the resident memory of the driver, the
ranks and engines (and the processes below an engine) at a third and at the end of the run, in MiB, and the slope
between the two in KiB a step.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil

from speechrl.data.audio import write_wav
from speechrl.data.manifest import write_manifest
from speechrl.models.tiny import build_qwen3_asr

CHARACTERS = "abcdefghijklmnopqrstuvwxyz 0123456789"
REWARD = "def reward_func(queries, prompts, labels):\n    return [float(len(set(q)) % 7) for q in queries]\n"
SAMPLE_S = 2.0


def make_inputs(out: Path) -> list[str]:
    """Model, noise and reward; the flags of the run."""
    out.mkdir(parents=True, exist_ok=True)
    build_qwen3_asr(out / "model", CHARACTERS, width=160, encoder_layers=2, decoder_layers=2)
    stream = np.random.default_rng(0)
    rows = []
    for index in range(48):
        samples = 0.1 * stream.standard_normal(int(16000 * (0.4 + 0.03 * index)))
        write_wav(out / f"{index}.wav", samples.astype(np.float32), 16000)
        rows.append({"id": f"n{index}", "audio": f"{index}.wav", "text": f"turn {index} on", "language": "English"})
    write_manifest(out / "noise.jsonl", rows)
    (out / "reward.py").write_text(REWARD)
    manifest = str(out / "noise.jsonl")
    return [
        "--actor.model_name_or_path", str(out / "model"), "--actor.device", "cpu", "--actor.num_ranks", "2",
        "--data.prompt_dataset", manifest, "--ds.param_dtype", "fp32", "--rollout.batch_size", "4",
        "--rollout.n_samples_per_prompt", "4", "--rollout.max_new_tokens", "8", "--train.batch_size", "8",
        "--reward.remote_url", str(out / "reward.py"), "--eval.dataset", f"dev={manifest}", "--eval.steps", "25",
        "--eval.max_new_tokens", "8", "--ckpt.save_steps", "25", "--ckpt.output_dir", str(out / "run"),
        "--ckpt.overwrite", "--tracking.save_rollouts", "--tracking.sample_steps", "0",
    ]  # fmt: skip


def memory_mib(driver: psutil.Process) -> dict[str, float]:
    """Resident memory of the driver and of each Ray actor below it."""
    found = {}
    for process in [driver, *driver.children(recursive=True)]:
        try:
            title = " ".join(process.cmdline()) or process.name()
            size = process.memory_info().rss / 2**20
        except psutil.Error:
            continue  # it ended just now
        if process == driver:
            found["driver"] = size
        elif title.startswith(("ray::", "VLLM::")) and "IDLE" not in title:
            found[f"{title.split('.')[0].split()[0]} {process.pid}"] = size
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/soak"))
    parser.add_argument("--steps", type=int, default=300)
    options, further = parser.parse_known_args()
    flags = [*make_inputs(options.out), "--train.max_steps", str(options.steps), *further]
    run = subprocess.Popen([sys.executable, "-m", "speechrl.cli", "train", *flags])
    driver = psutil.Process(run.pid)
    metrics, samples = options.out / "run" / "metrics.jsonl", []
    while run.poll() is None:
        step = len(metrics.read_bytes().splitlines()) if metrics.exists() else 0
        samples.append({"step": step, "mib": memory_mib(driver)})
        time.sleep(SAMPLE_S)
    (options.out / "memory.json").write_text(json.dumps(samples, indent=1))
    if run.returncode:
        raise SystemExit(f"the run ended with {run.returncode}")
    third = next(sample for sample in samples if sample["step"] >= options.steps // 3)
    last = [sample for sample in samples if third["mib"].keys() <= sample["mib"].keys()][-1]
    for name, before in third["mib"].items():
        after, steps = last["mib"][name], last["step"] - third["step"]
        print(
            f"{name}: {before:.0f} MiB at step {third['step']}, {after:.0f} MiB at step {last['step']}: "
            f"{1024 * (after - before) / max(steps, 1):+.1f} KiB a step"
        )


if __name__ == "__main__":
    main()
