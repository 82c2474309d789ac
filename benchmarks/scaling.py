"""How the cost of an update grows with samples, audio and utterances: prompts repeated against prompts shared.

    python benchmarks/scaling.py OUT [--model FOLDER]

Forward and backward of one rollout batch (see train_step.py), one axis at a time around 8 samples of 2 x 10 s. Without
--model a small Qwen3-ASR shape is made, which a CPU can run. Writes OUT/scaling.jsonl and OUT/scaling.png. Encoder
outputs are random numbers of the right shape: they are at hand in both ways. On a CPU seconds are the processor's.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import matplotlib
import torch
from train_step import CUDA, DEVICE, packing_of, run, timed

from speechrl.models.load import load_model
from speechrl.models.policy import PolicyModule
from speechrl.models.prompts import PromptBuilder
from speechrl.models.tiny import build_qwen3_asr
from speechrl.training.batch import Row

matplotlib.use("Agg")
WAYS = ("repeated", "shared")
AUDIO_TOKENS_PER_S = 12.5
TEXT_TOKENS = 16  # of a prompt, around its audio


@dataclass(frozen=True)
class Point:
    """One batch: samples of a prompt, seconds of audio, utterances, tokens of a completion."""

    samples: int = 8
    audio_s: float = 10.0
    utterances: int = 2
    tokens: int = 32


AXES = {"samples": (2, 4, 8, 16), "audio_s": (2.5, 5.0, 10.0, 20.0, 30.0), "utterances": (1, 2, 4, 8)}
LABELS = {"samples": "samples of a prompt (G)", "audio_s": "seconds of audio", "utterances": "utterances a step"}


class Bench:
    """The model, with prompts and completions made up for a point."""

    def __init__(self, model: Path):
        loaded = load_model(str(model), "bf16" if CUDA else "fp32")
        loaded.model.to(DEVICE)
        builder = PromptBuilder(loaded, "", False)
        self.module = PolicyModule(loaded, builder.banned_ids).train()
        self.pad_id, self.audio_id = builder.pad_id, builder.audio_id
        self.width = self.module.encoder.config.d_model
        self.vocabulary = len(builder.tokenizer)
        self.audio: dict[str, torch.Tensor] = {}

    def rows(self, point: Point) -> list[Row]:
        stream = random.Random(0)
        count = int(point.audio_s * AUDIO_TOKENS_PER_S)
        draw = lambda size: tuple(stream.choices(range(16, self.vocabulary), k=size))  # noqa: E731
        prompts = [(*draw(TEXT_TOKENS), *(self.audio_id,) * count) for _ in range(point.utterances)]
        like = next(self.module.parameters())
        self.audio = {
            str(index): torch.randn(count, self.width, dtype=like.dtype, device=DEVICE) for index in range(len(prompts))
        }
        return [
            Row(str(index), prompt, draw(point.tokens))
            for index, prompt in enumerate(prompts)
            for _ in range(point.samples)
        ]


def measure(bench: Bench, point: Point, way: str, repeats: int) -> float:
    """Median seconds."""
    rows = bench.rows(point)
    return timed(run(bench, way, rows, packing_of(way, 8)), repeats)[0]


def plot(results: Sequence[dict], out: Path) -> None:
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(AXES), figsize=(12, 3.6), layout="constrained")
    for panel, axis in zip(panels, AXES, strict=True):
        for way in WAYS:
            points = [item for item in results if item["axis"] == axis and item["way"] == way]
            panel.plot([item[axis] for item in points], [item["seconds"] for item in points], marker="o", label=way)
        panel.set(xlabel=LABELS[axis], ylim=(0, None))
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("seconds of forward and backward" if CUDA else "CPU seconds, forward and backward")
    panels[0].legend(title="prompts")
    figure.savefig(out, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    model = options.model or options.out / "model"
    if options.model is None:
        build_qwen3_asr(model, "abcdefgh ", width=320, encoder_layers=1, decoder_layers=6)
    bench = Bench(model)
    results = []
    for axis, values in AXES.items():
        for value in values:
            for way in WAYS:
                point = replace(Point(), **{axis: value})
                seconds = round(measure(bench, point, way, options.repeats), 3)
                results.append({"axis": axis, "way": way, **vars(point), "seconds": seconds})
                print(json.dumps(results[-1]), flush=True)
    (options.out / "scaling.jsonl").write_text("".join(json.dumps(item) + "\n" for item in results))
    plot(results, options.out / "scaling.png")


if __name__ == "__main__":
    main()
