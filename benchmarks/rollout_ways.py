"""Ways to give audio to vLLM, each bare (no Ray, no trainer), for the same prompts: seconds a batch.

    python benchmarks/rollout_ways.py INPUTS WAY [--tokens 64] [--samples 8]

WAY   audio    the whole model in vLLM, raw audio in each request (its encoder runs there); and `cached`, the same with
               audio that vLLM's encoder cache has seen: the floor of that way, not a thing to have
      embeds   the language model alone, prompts as embeddings
      rows     the language model alone, audio as rows past the vocabulary: what speechrl does

Encoder time is part of `audio` only; speechrl pays it once on the policy, for rollouts and training together. Prints
one line of JSON for each set of make_inputs.py (10 s: 64 utterances, 30 s: 32).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from make_inputs import STEPS
from torch import Tensor

from speechrl.data.audio import load_audio
from speechrl.data.manifest import read_manifest
from speechrl.models.load import load_model
from speechrl.models.policy import PolicyModule
from speechrl.models.prompts import PromptBuilder
from speechrl.rollout import vllm_api
from speechrl.rollout.engine import EngineInput, EngineSpec, Sampling
from speechrl.sections import Vllm
from speechrl.training.weight_sync import engine_config

BATCHES = 5  # the first warms up
EAGER = not torch.cuda.is_available()
OPTIONS = Vllm(gpu_memory_utilization=0.6, max_model_len=1024, max_audio_tokens=16384, enforce_eager=EAGER)


@dataclass(frozen=True)
class Item:
    """One prompt in every form."""

    input: EngineInput
    rows_AH: Tensor
    embeds_TH: Tensor

    @property
    def audio(self) -> Any:
        return load_audio(self.input.prompt.utterance.audio)


@torch.no_grad()
def prepare(inputs: Path, name: str) -> tuple[EngineSpec, list[list[Item]]]:
    """What an engine must know of the model, and batches of prompts; the model itself is gone afterwards."""
    device = "cpu" if EAGER else "cuda"
    dtype = "fp32" if EAGER else "bf16"
    loaded = load_model(str(inputs / "model"), dtype)
    loaded.model.to(device)
    builder = PromptBuilder(loaded, "", False)
    module = PolicyModule(loaded, builder.banned_ids)
    spec = EngineSpec(
        hf_config=engine_config(loaded.model, loaded.family),
        dtype=dtype,
        num_audio_rows=OPTIONS.max_audio_tokens,
        max_model_len=OPTIONS.max_model_len,
        banned_ids=builder.banned_ids,
        stop_ids=builder.stop_ids,
    )
    utterances = read_manifest(str(inputs / f"{name}.jsonl"))
    size = len(utterances) // STEPS
    batches = []
    for start in range(0, BATCHES * size, size):
        batch = []
        for item in map(builder.prepare, utterances[start : start + size]):
            encoded = module.encode([item.features])
            ids_1T = torch.tensor([item.prompt.token_ids], device=device)
            embeds_1TH = module.embed(ids_1T, encoded, [0])
            rows_AH = module.project(encoded)[0]
            engine_input = EngineInput(item.prompt, module.audio_id, len(rows_AH))
            batch.append(Item(engine_input, rows_AH.cpu(), embeds_1TH[0].cpu()))
        batches.append(batch)
    return spec, batches


def make_llm(inputs: Path, way: str, spec: EngineSpec) -> Any:
    """vLLM as it comes: the whole model for `audio`, its language model alone for `embeds`."""
    from vllm import LLM

    common = dict(
        dtype={"fp32": "float32", "bf16": "bfloat16"}[spec.dtype],
        max_model_len=spec.max_model_len,
        gpu_memory_utilization=OPTIONS.gpu_memory_utilization,
        enforce_eager=EAGER,
        generation_config="vllm",
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
    )
    if way == "audio":
        return LLM(model=str(inputs / "model"), limit_mm_per_prompt={"audio": 1}, **common)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(spec.hf_config))
        return LLM(
            model=folder, load_format="dummy", skip_tokenizer_init=True, enable_prompt_embeds=True, **common
        )  # fmt: skip


def generate(llm: Any, prompts: Sequence[dict], spec: EngineSpec, sampling: Sampling) -> int:
    """Sample; returns the number of tokens."""
    from vllm import SamplingParams

    parameters = [
        SamplingParams(
            n=sampling.num_samples,
            max_tokens=sampling.max_new_tokens,
            stop_token_ids=list(spec.stop_ids),
            logit_bias=dict.fromkeys(spec.banned_ids, -100.0),
            logprobs=0,
            seed=index,
            detokenize=False,
        )
        for index in range(len(prompts))
    ]
    outputs = llm.generate(prompts, parameters, use_tqdm=False)
    return sum(len(sample.token_ids) for request in outputs for sample in request.outputs)


def with_audio(item: Item) -> dict:
    """The prompt with one placeholder and its sound, as vLLM's processor wants it."""
    ids = list(item.input.prompt.token_ids)
    first = ids.index(item.input.audio_id)
    short = ids[: first + 1] + [token for token in ids[first:] if token != item.input.audio_id]
    return {"prompt_token_ids": short, "multi_modal_data": {"audio": [(item.audio, 16000)]}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", type=Path)
    parser.add_argument("way", choices=["audio", "embeds", "rows"])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    options = parser.parse_args()
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    sampling = Sampling(num_samples=options.samples, max_new_tokens=options.tokens)
    prepared = {name: prepare(options.inputs, name) for name in ("10s", "30s")}
    torch.cuda.empty_cache()
    spec = prepared["10s"][0]
    rows = options.way == "rows"
    llm = vllm_api.make_llm(spec, OPTIONS, 0) if rows else make_llm(options.inputs, options.way, spec)
    for name, (_, batches) in prepared.items():
        results: dict[str, list[tuple[float, int]]] = {}
        for batch in batches:
            for way in ("audio", "cached") if options.way == "audio" else (options.way,):
                results.setdefault(way, []).append(timed(llm, batch, way, spec, sampling))
        for way, runs in results.items():
            seconds = [round(value, 3) for value, _ in runs]
            result = {"way": way, "set": name, "seconds": statistics.median(seconds[1:]), "each": seconds}
            print(json.dumps(result | {"tokens": runs[-1][1]}), flush=True)


def timed(llm: Any, batch: Sequence[Item], way: str, spec: EngineSpec, sampling: Sampling) -> tuple[float, int]:
    """(seconds, tokens) of one batch."""
    if way == "rows":
        inputs, audio_RH = [item.input for item in batch], torch.cat([item.rows_AH for item in batch])
        started = time.monotonic()
        vllm_api.take_audio(llm, [audio_RH])
        groups = vllm_api.complete(llm, inputs, spec, sampling)
        num_tokens = sum(len(sample.token_ids) for _, group in groups for sample in group)
        return time.monotonic() - started, num_tokens
    prompts = [{"prompt_embeds": item.embeds_TH} if way == "embeds" else with_audio(item) for item in batch]
    llm.reset_prefix_cache()
    started = time.monotonic()
    num_tokens = generate(llm, prompts, spec, sampling)
    return time.monotonic() - started, num_tokens


if __name__ == "__main__":
    main()
