"""A tensor from one process to another through Ray's store: seconds of each way in the same run.

    python benchmarks/through_ray.py [--megabytes 192] [--repeats 5]

WAY   tensor   as it is: Ray pickles it
      bytes    speechrl.rollout.weights: an array, which the other process reads where it lies

The other process reads every byte once. Prints one line of JSON a way, ratios against the first. Audio of 64 x 10 s is
34 MB in the shape of Qwen3-ASR-1.7B, a bucket of weights as large as --vllm.sync_bucket_mb.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from typing import Any

import ray
import torch
from torch import Tensor

from speechrl.rollout.weights import borrow, lend


@ray.remote
class Reader:
    def read(self, sent: Any) -> float:
        tensor = sent if isinstance(sent, Tensor) else borrow(sent)
        return float(tensor.sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=192)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    store_bytes = (4 * options.megabytes + 256) * 2**20
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=store_bytes)
    reader = Reader.remote()
    tensor = torch.randn(options.megabytes * 2**18)
    first = 0.0
    for name in ("tensor", "bytes"):
        seconds = []
        for _ in range(1 + options.repeats):  # the first warms up
            started = time.monotonic()
            ray.get(reader.read.remote(ray.put(tensor if name == "tensor" else lend(tensor))))
            seconds.append(time.monotonic() - started)
        median = statistics.median(seconds[1:])
        first = first or median
        result = {"way": name, "megabytes": options.megabytes, "seconds": round(median, 3)}
        print(json.dumps(result | {"times_faster": round(first / median, 1)}), flush=True)


if __name__ == "__main__":
    main()
