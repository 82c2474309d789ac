"""The CTC loss of a batch of clips, forward and backward: CPU seconds of each way in the same run, on one thread.

    python benchmarks/ctc_ways.py [--clips 256] [--repeats 3]

WAY   clips    log_softmax of one clip after the other, padded by torch's pad_sequence
      batch    speechrl.models.ctc: one log_softmax, one copy into the padded tensor

Clips of 20 to 100 frames with 10 to 40 of 100 units, random; prints one line of JSON a way, ratios against the first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from speechrl.models.ctc import CtcTarget, ctc_nll

UNITS = 100


def clip_by_clip(logits_NK: Tensor, lengths: Sequence[int], target: CtcTarget) -> Tensor:
    """As `ctc_nll`."""
    logprobs = [item.float().log_softmax(-1) for item in logits_NK.split(list(lengths))]
    units = torch.tensor([unit for units in target.units for unit in units])
    sizes = torch.tensor([len(units) for units in target.units])
    padded = pad_sequence(logprobs)
    return F.ctc_loss(padded, units, torch.tensor(lengths), sizes, reduction="none", zero_infinity=True).sum()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clips", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    lengths = torch.randint(20, 101, (options.clips,)).tolist()
    sizes = torch.randint(10, 41, (options.clips,)).tolist()
    target = CtcTarget(tuple(tuple(torch.randint(1, UNITS + 1, (size,)).tolist()) for size in sizes))
    logits_NK = torch.randn(sum(lengths), UNITS + 1, requires_grad=True)
    first = 0.0
    for name, way in (("clips", clip_by_clip), ("batch", ctc_nll)):
        seconds = []
        for _ in range(1 + options.repeats):  # the first warms up
            started = time.process_time()
            loss = way(logits_NK, lengths, target)
            loss.backward()
            seconds.append(time.process_time() - started)
        median = statistics.median(seconds[1:])
        first = first or median
        result = {"way": name, "seconds": round(median, 4), "times_faster": round(first / median, 1)}
        print(json.dumps(result | {"loss": round(loss.item(), 1)}), flush=True)


if __name__ == "__main__":
    main()
