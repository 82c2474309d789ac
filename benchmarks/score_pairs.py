"""Scoring speed: 100,000 hypotheses in ten languages, eight a reference, through CER and all parts of an ASR reward.

    python benchmarks/score_pairs.py                  # two processes
    python benchmarks/score_pairs.py --pairs 10000 --processes 4

Prints pairs a second by the clock and by the processor's time (which a shared machine doesn't blur), and how many times
as fast as jiwer each way is. jiwer gets the raw texts and does not normalise: its time counts, not its rates. No
accelerator, no model; the pairs are made here, from a seed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import runpy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jiwer

from speechrl.reward.metrics import cer, error_rates

ASR_REWARD = Path(__file__).resolve().parent.parent / "rewards" / "asr.py"
GROUP = 8
BATCH = 512  # hypotheses a call, as of a step with 64 utterances

SENTENCES = {
    "English": "Could you turn on the kitchen light, please? It’s already dark outside and the children come home.",
    "German": "Wir fahren morgen früh mit dem Zug nach München, weil die Straße über den Pass gesperrt ist.",
    "French": "L’hiver dernier, nous avons passé trois semaines à la montagne chez des amis d’enfance.",
    "Russian": "Сегодня вечером обещают сильный дождь, поэтому возьмите зонт и тёплую куртку.",
    "Vietnamese": "Hôm nay trời đẹp quá, chúng ta cùng nhau ra công viên đi dạo một lát nhé.",
    "Korean": "오늘 저녁에는 비가 많이 온다고 하니까 우산을 꼭 챙겨 가세요.",
    "Hindi": "कृपया रसोई की बत्ती जला दीजिए, बाहर अँधेरा हो गया है और बच्चे घर लौट रहे हैं।",
    "Thai": "วันนี้อากาศดีมาก เราไปเดินเล่นที่สวนสาธารณะด้วยกันเถอะ",
    "Chinese": "请把厨房的灯打开，外面天已经黑了，孩子们马上就要回家了，我用 iPhone 给他们打个电话。",
    "Japanese": "今夜は雨が強くなるそうですから、傘を忘れずに持って出かけてください。",
}


@dataclass(frozen=True)
class Pair:
    """One hypothesis with its reference; keywords are three pieces of the sentence."""

    hyp: str
    ref: str
    language: str
    keywords: tuple[str, ...]


def make_pairs(number: int, seed: int) -> list[Pair]:
    """Groups of eight hypotheses with about 10 % of characters wrong, languages in turn, no reference twice."""
    rng = random.Random(seed)
    pairs: list[Pair] = []
    while len(pairs) < number:
        language, sentence = list(SENTENCES.items())[len(pairs) // GROUP % len(SENTENCES)]
        ref = _spoilt(sentence, rng)
        starts = [rng.randrange(len(ref) - 6) for _ in range(3)]
        keywords = tuple(ref[start : start + 6] for start in starts)
        pairs += [Pair(_spoilt(ref, rng), ref, language, keywords) for _ in range(GROUP)]
    return pairs[:number]


def _spoilt(text: str, rng: random.Random) -> str:
    chars = []
    for char in text:
        chars += rng.choices([[char], [], [rng.choice(text)], [char, rng.choice(text)]], [90, 4, 3, 3])[0]
    return "".join(chars)


# --- ways to score: batch -> a number for each hypothesis -----------------------------------------------------------


def by_jiwer(batch: Sequence[Pair]) -> list[float]:
    return [float(jiwer.cer(pair.ref, pair.hyp)) for pair in batch]


def one_by_one(batch: Sequence[Pair]) -> list[float]:
    return [cer(pair.hyp, pair.ref, pair.language) for pair in batch]


def batched(batch: Sequence[Pair]) -> list[float]:
    return error_rates("cer", [p.hyp for p in batch], [p.ref for p in batch], [p.language for p in batch])


def all_parts(batch: Sequence[Pair]) -> list[float]:
    hyps, refs, none = [pair.hyp for pair in batch], [pair.ref for pair in batch], [None] * len(batch)
    answer = _reward()(
        hyps,
        [""] * len(batch),
        refs,
        responses=hyps,
        raw_responses=hyps,
        finish_reasons=["stop"] * len(batch),
        languages=[pair.language for pair in batch],
        keywords=[list(pair.keywords) for pair in batch],
        metadata=[{}] * len(batch),
        audio_paths=none,
        durations_s=none,
    )
    return answer["rewards"]


_loaded: list[Callable] = []


def _reward() -> Callable:
    if not _loaded:
        _loaded.append(runpy.run_path(str(ASR_REWARD))["reward_func"])
    return _loaded[0]


# name -> (function, processes): None is as many as asked for
WAYS: dict[str, tuple[Callable[[Sequence[Pair]], list[float]], int | None]] = {
    "CER, jiwer, raw text": (by_jiwer, None),
    "CER, one by one, one process": (one_by_one, 1),
    "CER, batched": (batched, None),
    "all parts of rewards/asr.py": (all_parts, None),
}


def batches(pairs: Sequence[Pair]) -> Iterator[Sequence[Pair]]:
    return (pairs[start : start + BATCH] for start in range(0, len(pairs), BATCH))


@dataclass(frozen=True)
class Timed:
    """wall_s: without the start of the processes, with the way of the texts to them. cpu_s: theirs, added up."""

    wall_s: float
    cpu_s: float


def measure(way: Callable[[Sequence[Pair]], list[float]], pairs: Sequence[Pair], processes: int) -> Timed:
    run = partial(_scored, way)
    if processes == 1:
        started = time.perf_counter()
        done = list(map(run, batches(pairs)))
        wall_s = time.perf_counter() - started
    else:
        with multiprocessing.get_context("spawn").Pool(processes) as pool:
            pool.map(run, [pairs[:1]] * processes, chunksize=1)  # imports
            started = time.perf_counter()
            done = pool.map(run, batches(pairs), chunksize=4)
            wall_s = time.perf_counter() - started
    scored = sum(number for number, _ in done)
    if scored != len(pairs):
        raise RuntimeError(f"{scored} scores for {len(pairs)} pairs")
    return Timed(wall_s, sum(cpu_s for _, cpu_s in done))


def _scored(way: Callable[[Sequence[Pair]], list[float]], batch: Sequence[Pair]) -> tuple[int, float]:
    started = time.process_time()
    return len(way(batch)), time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=100_000, help="hypotheses to score")
    parser.add_argument("--processes", type=int, default=2, help="processes that share the pairs")
    parser.add_argument("--seed", type=int, default=0, help="of the texts and of the errors in them")
    options = parser.parse_args()
    pairs = make_pairs(options.pairs, options.seed)
    print(f"{len(pairs)} pairs, {sum(len(pair.hyp) for pair in pairs) / len(pairs):.0f} characters a hypothesis")
    print("| way | processes | pairs/s | pairs per CPU second | CPU seconds, jiwer's over its own |")
    print("|---|---|---|---|---|")
    jiwer_cpu_s = None
    for name, (way, fixed) in WAYS.items():
        processes = fixed or options.processes
        took = measure(way, pairs, processes)
        jiwer_cpu_s = jiwer_cpu_s or took.cpu_s
        rates = f"{len(pairs) / took.wall_s:.0f} | {len(pairs) / took.cpu_s:.0f} | {jiwer_cpu_s / took.cpu_s:.1f}"
        print(f"| {name} | {processes} | {rates} |", flush=True)


if __name__ == "__main__":
    main()
