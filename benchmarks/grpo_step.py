"""Where the time of a GRPO step goes: `speechrl train` on the benchmark's model, a few steps, medians.

    python benchmarks/grpo_step.py INPUTS SET OUT [flags of speechrl train]

INPUTS and SET as in rollout_ways.py. Flags choose the placement: --train.colocate_all, or engines on GPUs of their own
(the default). Prints one line of JSON; the first step, which starts up, is left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from make_inputs import STEPS

ROOT = Path(__file__).parent.parent
SHOWN = (
    "time/step_s", "time/rollout_s", "time/encode_s", "time/engine_s", "time/update_s", "time/sync_s", "time/wake_s",
    "time/release_s", "time/advantages_s", "time/reference_s", "time/save_s", "time/other_s", "sync/megabytes",
    "gap/abs_mean_nats", "gap/abs_max_nats", "memory/policy_peak_gib", "rollout/tokens", "rollout/length_mean_tokens",
    "train/mfu", "train/tflops_per_rank",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", type=Path)
    parser.add_argument("set", choices=["10s", "30s"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=5)
    options, flags = parser.parse_known_args()
    manifest = options.inputs / f"{options.set}.jsonl"
    per_step = len(manifest.read_text().splitlines()) // STEPS
    command = [
        sys.executable, "-m", "speechrl.cli", "train", "--actor.model_name_or_path", options.inputs / "model",
        "--data.prompt_dataset", manifest, "--reward.remote_url", ROOT / "benchmarks" / "hash_reward.py",
        "--rollout.engine", "vllm", "--rollout.batch_size", per_step, "--rollout.n_samples_per_prompt", "8",
        "--rollout.max_new_tokens", "64", "--vllm.max_model_len", "1024", "--vllm.max_audio_tokens", "16384",
        "--train.max_steps", options.steps, "--train.num_episodes", "1", "--ckpt.output_dir", options.out,
        "--ckpt.overwrite", "--ckpt.no_save_hf", "--tracking.no_tensorboard", "--tracking.sample_steps", "0", *flags,
    ]  # fmt: skip
    subprocess.run(list(map(str, command)), cwd=ROOT, check=True, stdout=sys.stderr)
    lines = [json.loads(line) for line in (options.out / "metrics.jsonl").read_text().splitlines()][1:]
    medians = {name: statistics.median(line[name] for line in lines) for name in SHOWN if name in lines[0]}
    if "time/sync_s" in medians:
        medians["sync/gb_per_s"] = medians["sync/megabytes"] * 2**20 / 1e9 / medians["time/sync_s"]
    rounded = {name: round(value, 4) for name, value in medians.items()}
    print(json.dumps({"set": options.set, "flags": flags} | rounded), flush=True)


if __name__ == "__main__":
    main()
