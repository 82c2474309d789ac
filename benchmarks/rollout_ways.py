"""Ways to give audio to vLLM for the same prompts, bare (no Ray, no trainer), and through speechrl: seconds a batch.

    python benchmarks/rollout_ways.py INPUTS WAY [--tokens 64] [--samples 8] [--rounds 4]

WAY   audio    the whole model in vLLM, raw audio in each request (its encoder runs there); and `cached`, the same with
               audio that vLLM's encoder cache has seen: the floor of that way, not a thing to have
      embeds   the language model alone, prompts as embeddings
      rows     the language model alone, audio as rows past the vocabulary: what speechrl does
      speechrl the same through speechrl's rank and engine, Ray actors on the same GPU: prompts, projector, transfer of
               the audio and of the samples, their texts; in turn with it `rows` with the same weights and, on a GPU,
               `host`, where audio goes to the engine through the host's memory, as it does between GPUs

Encoder time is part of `audio` only; speechrl pays it once on the policy, for rollouts and training together, while the
batch before is trained on. Prints lines of JSON for each set of make_inputs.py (10 s: 64 utterances, 30 s: 32). With
`speechrl` every batch is given --rounds times to all, in random order. `to_first`: the quartiles (the second is the
median) of a way's time over the first way's for the same batch in the same round; `not_engine_s`: those of what is left
of speechrl's time without its engine's.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import ray
import torch
from make_inputs import STEPS
from torch import Tensor

from speechrl.config import EvalConfig
from speechrl.data.audio import load_audio
from speechrl.data.manifest import read_manifest
from speechrl.launch import cluster, evaluation_engine, num_beside_ranks
from speechrl.models.load import load_model
from speechrl.models.policy import PolicyModule
from speechrl.models.prompts import PromptBuilder
from speechrl.rollout import vllm_api
from speechrl.rollout.engine import EngineInput, EngineSpec, Sampling
from speechrl.rollout.vllm import VllmEngine
from speechrl.rollout.weights import pack
from speechrl.sections import Evaluation, Precision, Runtime, Vllm
from speechrl.training.weight_sync import buckets, engine_config
from speechrl.types import Utterance

BATCHES = 8  # the first warms up
EAGER = not torch.cuda.is_available()
THROUGH = ("rows", "speechrl") if EAGER else ("rows", "speechrl", "host")
DTYPE: Literal["fp32", "bf16"] = "fp32" if EAGER else "bf16"
OPTIONS = Vllm(gpu_memory_utilization=0.6, max_model_len=1024, max_audio_tokens=16384, enforce_eager=EAGER)
HALF = OPTIONS.model_copy(update={"gpu_memory_utilization": 0.3})  # two engines share the GPU


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
    loaded = load_model(str(inputs / "model"), DTYPE)
    loaded.model.to(device)
    builder = PromptBuilder(loaded, "", False)
    module = PolicyModule(loaded, builder.banned_ids)
    spec = EngineSpec(
        hf_config=engine_config(loaded.model, loaded.family),
        dtype=DTYPE,
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


def give_weights(llm: Any, inputs: Path) -> None:
    """The language model's weights to an engine of `vllm_api.make_llm`."""
    loaded = load_model(str(inputs / "model"), DTYPE)
    vllm_api.start_update(llm)
    for weights in buckets(PolicyModule(loaded, ()), loaded.family, False, 2**29):
        bucket, flat = pack(weights)
        vllm_api.load_bucket(llm, replace(bucket, flat=flat))
    vllm_api.finish_update(llm)


@contextmanager
def through_speechrl(inputs: Path) -> Iterator[VllmEngine]:
    """A rank and an engine that feed on each other as in a run, with the model's weights."""
    config = EvalConfig(
        eval=Evaluation(engine="vllm"),
        vllm=HALF,
        ds=Precision(param_dtype=DTYPE),
        actor=Runtime(device="cpu" if EAGER else "cuda"),
    )
    with cluster(config.ray, 1, num_beside_ranks(config)), evaluation_engine(config, str(inputs / "model")) as engine:
        assert isinstance(engine, VllmEngine)
        engine.sync()
        yield engine


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
    parser.add_argument("way", choices=["audio", "embeds", "rows", "speechrl"])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: at least 1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    prepared = {name: prepare(options.inputs, name) for name in ("10s", "30s")}
    torch.cuda.empty_cache()
    spec = prepared["10s"][0]
    rows = options.way in ("rows", "speechrl")
    llm = (
        vllm_api.make_llm(spec, OPTIONS if options.way == "rows" else HALF, 0)
        if rows
        else make_llm(options.inputs, options.way, spec)
    )
    bench = Bench(llm, spec, Sampling(num_samples=options.samples, max_new_tokens=options.tokens))
    if options.way == "speechrl":
        give_weights(llm, options.inputs)
    with through_speechrl(options.inputs) if options.way == "speechrl" else nullcontext() as engine:
        bench.engine = engine
        for name, (_, batches) in prepared.items():
            if options.way == "speechrl":
                bench.measure(name, list(batches) * options.rounds, THROUGH, random.Random(0))
            else:
                bench.measure(name, batches, ("audio", "cached") if options.way == "audio" else (options.way,))


@dataclass(frozen=True)
class Timed:
    """One batch. engine_s: what of the seconds its engine took, where that is not all."""

    seconds: float
    num_tokens: int
    engine_s: float | None = None


@dataclass
class Bench:
    """What a batch can be given to. engine: of the way `speechrl`."""

    llm: Any
    spec: EngineSpec
    sampling: Sampling
    engine: VllmEngine | None = None

    def measure(
        self, name: str, batches: Sequence[Sequence[Item]], ways: Sequence[str], order: random.Random | None = None
    ) -> None:
        """Every way on one batch after the other, as they stand or in the order that chance gives; prints what all
        batches but the first took, and each on stderr.
        """
        results: dict[str, list[Timed]] = {way: [] for way in ways}
        for batch in batches:
            for way in order.sample(ways, len(ways)) if order else ways:
                timed = self.timed(batch, way)
                results[way].append(timed)
                print(json.dumps({"way": way, "set": name} | asdict(timed)), file=sys.stderr, flush=True)
        for way, runs in results.items():
            counted = list(zip(runs, results[ways[0]], strict=True))[1:]
            result = {
                "way": way,
                "set": name,
                "median_s": round(statistics.median(mine.seconds for mine, _ in counted), 3),
                "mean_s": round(statistics.mean(mine.seconds for mine, _ in counted), 3),
                "to_first": _quartiles([mine.seconds / its.seconds for mine, its in counted]),
                "tokens": runs[-1].num_tokens,
            }
            if rest := [mine.seconds - mine.engine_s for mine, _ in counted if mine.engine_s is not None]:
                result["not_engine_s"] = _quartiles(rest)
            print(json.dumps(result), flush=True)

    def timed(self, batch: Sequence[Item], way: str) -> Timed:
        if way in ("speechrl", "host"):
            assert self.engine is not None
            self.engine.same_gpu = way == "speechrl" and not EAGER
            return self.timed_through_speechrl(self.engine, [item.input.prompt.utterance for item in batch])
        if way == "rows":
            inputs, audio_RH = [item.input for item in batch], torch.cat([item.rows_AH for item in batch])
            started = time.monotonic()
            vllm_api.take_audio(self.llm, [audio_RH])
            steps = vllm_api.complete(self.llm, inputs, self.spec, self.sampling)
            num_tokens = sum(len(sample.token_ids) for groups in steps for _, group in groups for sample in group)
            return Timed(time.monotonic() - started, num_tokens)
        prompts = [{"prompt_embeds": item.embeds_TH} if way == "embeds" else with_audio(item) for item in batch]
        self.llm.reset_prefix_cache()
        started = time.monotonic()
        num_tokens = generate(self.llm, prompts, self.spec, self.sampling)
        return Timed(time.monotonic() - started, num_tokens)

    def timed_through_speechrl(self, engine: VllmEngine, utterances: Sequence[Utterance]) -> Timed:
        """As a step of training samples, whose audio was encoded while the step before was trained on."""
        ray.get(engine.policy.ranks[0].engine_inputs.remote(utterances))  # the encoder's outputs are kept
        started = time.monotonic()
        groups = engine.generate(utterances, self.sampling)
        seconds = time.monotonic() - started
        engine.forget()
        num_tokens = sum(len(rollout.token_ids) for group in groups for rollout in group.rollouts)
        return Timed(seconds, num_tokens, engine.timings()["time/engine_s"])


def _quartiles(values: Sequence[float]) -> list[float]:
    return [round(value, 3) for value in statistics.quantiles(values, n=4)]


if __name__ == "__main__":
    main()
