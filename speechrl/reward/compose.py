"""One reward out of named parts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence


def weighted_sum(parts: Mapping[str, Sequence[float | None]], weights: Mapping[str, float]) -> list[float | None]:
    """Weighted mean of the parts, one value per sample: sum(w * part) / sum(w) over the parts that apply to it.

    Weights are relative: {"cer": 3, "fluency": 1} is {"cer": 0.75, "fluency": 0.25}. With parts in [0, 1] the result is
    in [0, 1], whatever abstains. A part should abstain (None) because of the reference, not of the hypothesis: then it
    abstains for a whole group, and the samples that are compared with each other share one scale. A sample whose parts
    all abstain, or have weight 0, gets None. A weight of 0 keeps a part for the logs.

    ValueError: names of parts and weights that differ, lengths that differ, a weight below 0, a value not finite.
    """
    if set(parts) != set(weights):
        unweighted, unknown = sorted(set(parts) - set(weights)), sorted(set(weights) - set(parts))
        raise ValueError(f"parts and weights differ: without a weight {unweighted}, without a part {unknown}")
    lengths = {name: len(values) for name, values in parts.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"parts differ in length: {lengths}")
    for name, weight in weights.items():
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f"weight of {name!r} is {weight}; it must be a finite number, 0 or more")
    return [_one(index, parts, weights) for index in range(next(iter(lengths.values()), 0))]


def _one(index: int, parts: Mapping[str, Sequence[float | None]], weights: Mapping[str, float]) -> float | None:
    total = scale = 0.0
    for name, values in parts.items():
        value = values[index]
        if value is None:
            continue
        if not math.isfinite(value):
            raise ValueError(f"part {name!r} of sample {index} is {value}; a part is a finite number, or None")
        total += weights[name] * value
        scale += weights[name]
    return total / scale if scale > 0 else None
