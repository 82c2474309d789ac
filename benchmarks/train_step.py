"""Forward and backward of one rollout batch, each way in turn: seconds, peak memory, useful TFLOP/s.

    python benchmarks/train_step.py INPUTS [--ways transformers repeated shared ...] [--samples 8] [--tokens 64]

WAY   transformers   padded rows [prompt | response], transformers' causal LM, logits of all positions, log_softmax
      repeated       speechrl with --train.no_shared_prefix: a prompt for every completion, chunked log-probs
      shared         speechrl: prompt once a group, scaled_dot_product_attention under a mask
      shared_flex    the same, groups of a micro-batch in one sequence, FlexAttention (CUDA)
      *_liger        any of them with Liger's fused RMSNorm, RoPE and SwiGLU (CUDA)
      *_single       what is done to logits as single operations, where FlexAttention would have it compiled

INPUTS of make_inputs.py. Encoder outputs are at hand in every way (speechrl keeps them from the rollout); projector and
language model train. Useful: each prompt counts once, padding and recomputation not at all. Prints one line of JSON for
each set and way; ratios against the first way.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from make_inputs import STEPS

from speechrl.data.manifest import read_manifest
from speechrl.models.attention import FLEX_BLOCK
from speechrl.models.flops import DecoderShape, training_flops
from speechrl.models.load import load_model, use_liger_kernels
from speechrl.models.policy import PolicyModule
from speechrl.models.prompts import PromptBuilder
from speechrl.training.batch import Packing, Row, RowBatch, collate, micro_batches

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
WAYS = ("transformers", "repeated", "shared", "shared_flex")


class Bench:
    """The model and the rows of one set."""

    def __init__(self, inputs: Path, name: str, liger: bool):
        loaded = load_model(str(inputs / "model"), "bf16" if CUDA else "fp32")
        loaded.model.to(DEVICE)
        builder = PromptBuilder(loaded, "", False)
        self.module = PolicyModule(loaded, builder.banned_ids).train()
        if liger:
            use_liger_kernels(self.module.decoder)
        self.pad_id = builder.pad_id
        self.shape = DecoderShape.of(self.module.decoder, self.module.model.get_output_embeddings())
        utterances = read_manifest(str(inputs / f"{name}.jsonl"))
        self.prepared = [builder.prepare(item) for item in utterances[: len(utterances) // STEPS]]
        features = [item.features for item in self.prepared]
        encoded = [item for i in range(0, len(features), 8) for item in self.module.encode(features[i : i + 8])]
        self.audio = dict(zip((item.prompt.utterance.id for item in self.prepared), encoded, strict=True))

    def rows(self, samples: int, tokens: int) -> list[Row]:
        stream = random.Random(0)
        return [
            Row(
                p.prompt.utterance.id,
                p.prompt.token_ids,
                tuple(stream.choices(range(16, self.shape.vocabulary), k=tokens)),
            )
            for p in self.prepared
            for _ in range(samples)
        ]

    def flops(self, samples: int, tokens: int) -> float:
        groups = [(len(item.prompt.token_ids), [tokens] * samples) for item in self.prepared]
        return training_flops(self.shape, groups)


def transformers_logprobs(module: PolicyModule, batch: RowBatch) -> torch.Tensor:
    """What a trainer without our head does: all logits in float32, then a gather."""
    embeds = module.embed(batch.ids_ST, batch.audio, batch.audio_index)
    hidden = module.decoder(inputs_embeds=embeds, use_cache=False).last_hidden_state
    logprobs = module.model.get_output_embeddings()(hidden[:, :-1]).float().log_softmax(-1)
    chosen = logprobs.gather(-1, batch.ids_ST[:, 1:, None])[..., 0]
    return chosen[batch.sequence_N, batch.place_N]


def timed(work: Callable[[], None], repeats: int) -> tuple[float, float]:
    """(median seconds, peak GiB) of a few calls after one that warms up; on a CPU the seconds are the process's own, so
    that other work on the machine counts little.
    """
    clock = time.monotonic if CUDA else time.process_time
    work()
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(repeats):
        started = clock()
        work()
        if CUDA:
            torch.cuda.synchronize()
        seconds.append(clock() - started)
    return statistics.median(seconds), torch.cuda.max_memory_allocated() / 2**30 if CUDA else float("nan")


def run(bench: Bench, way: str, rows: Sequence[Row], packing: Packing) -> Callable[[], None]:
    def work() -> None:
        for batch_rows in micro_batches(rows, packing):
            batch = collate(batch_rows, bench.audio, bench.pad_id, DEVICE, packing)
            if way == "transformers":
                loss = transformers_logprobs(bench.module, batch).sum()
            else:
                loss = bench.module(batch, with_entropy=True)[0].sum()
            (loss / len(rows)).backward()
        bench.module.zero_grad(set_to_none=True)

    return work


def packing_of(way: str, max_rows: int) -> Packing:
    if way == "shared_flex":
        return Packing(max_rows, one_sequence=True, multiple=FLEX_BLOCK)
    return Packing(max_rows, shared_prefix=way == "shared", multiple=8 if CUDA else 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", type=Path)
    parser.add_argument("--ways", nargs="+", default=list(WAYS[: 4 if CUDA else 3]))
    parser.add_argument("--sets", nargs="+", default=["10s", "30s"])
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument(
        "--rows", type=int, default=64 if CUDA else 8, help="completions a micro-batch; transformers: 8"
    )
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    for name in options.sets:
        first: dict[str, Any] = {}
        for way in options.ways:
            bare_way, single = way.removesuffix("_single"), way.endswith("_single")
            plain_way, liger = bare_way.removesuffix("_liger"), bare_way.endswith("_liger")
            bench = Bench(options.inputs, name, liger)
            rows = bench.rows(options.samples, options.tokens)
            if plain_way == "shared_flex":
                bench.module.use_flex_attention()
                bench.module.compiled = not single
            packing = packing_of(plain_way, 8 if plain_way == "transformers" else options.rows)
            seconds, peak = timed(run(bench, plain_way, rows, packing), options.repeats)
            result = {"set": name, "way": way, "seconds": round(seconds, 3), "peak_gib": round(peak, 1)}
            result["useful_tflops"] = round(bench.flops(options.samples, options.tokens) / seconds / 1e12, 1)
            first = first or result
            result["times_faster"] = round(first["seconds"] / seconds, 2)
            print(json.dumps(result), flush=True)
            del bench
            if CUDA:
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
