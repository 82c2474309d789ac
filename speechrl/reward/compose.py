"""One reward out of named parts.

A part is a column: one value per sample, None where it abstains. Every function here takes columns and gives columns of
the same length, and None stays None: metric -> shape -> gate -> weighted sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Column = list[float | None]


def weighted_sum(parts: Mapping[str, Sequence[float | None]], weights: Mapping[str, float]) -> Column:
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


def gate(part: Sequence[float | None], on: Sequence[float | None], at_least: float) -> Column:
    """A part that only counts where another passes: `part` where `on` >= at_least, 0 (not None) where it is below.

    0 keeps the weight of the part in the sum, so failing the gate costs what the part is worth; with None the other
    parts would take its place. Where `on` abstains the gate does not apply and the part counts; where `part` abstains
    the result abstains. ValueError: lengths that differ, a bound not finite.
    """
    if len(part) != len(on):
        raise ValueError(f"the gated part has {len(part)} values, but {len(on)} are there to gate it on")
    if not math.isfinite(at_least):
        raise ValueError(f"at_least is {at_least}; it must be a finite number")
    passed = [condition is None or condition >= at_least for condition in on]
    return [value if value is None or ok else 0.0 for value, ok in zip(part, passed, strict=True)]


def one_minus(rates: Sequence[float | None]) -> Column:
    """1 - min(rate, 1) of error rates, in [0, 1]: rates from 1 on are equally bad. ValueError for a rate below 0."""
    return _each(rates, lambda rate: 1.0 - min(rate, 1.0), "an error rate", 0.0)


def one_minus_tanh(rates: Sequence[float | None], *, a: float = 1.0) -> Column:
    """1 - tanh(a * rate) of error rates, in [0, 1]: steep near 0, and still falling where `one_minus` is flat.

    a: slope at a rate of 0. ValueError for a rate below 0, or a not above 0.
    """
    _above_zero(a)
    return _each(rates, lambda rate: 1.0 - math.tanh(a * rate), "an error rate", 0.0)


def exponential(rates: Sequence[float | None], *, a: float = 1.0) -> Column:
    """exp(-a * rate) of error rates, in [0, 1]: each further error costs the same share of what is left.

    a: slope at a rate of 0. ValueError for a rate below 0, or a not above 0.
    """
    _above_zero(a)
    return _each(rates, lambda rate: math.exp(-a * rate), "an error rate", 0.0)


def clip(values: Sequence[float | None], *, low: float = 0.0, high: float = 1.0) -> Column:
    """Values moved into [low, high]. ValueError for a value not finite, or low not below high."""
    if not low < high:
        raise ValueError(f"low {low} is not below high {high}")
    return _each(values, lambda value: min(max(value, low), high), "a part", -math.inf)


@dataclass(frozen=True)
class Shape:
    """A named shape of YAML rewards. falls: turns "less is better" into "more is better", so it is for error rates."""

    function: Callable[..., Column]
    falls: bool


SHAPES: dict[str, Shape] = {
    "one_minus": Shape(one_minus, falls=True),
    "one_minus_tanh": Shape(one_minus_tanh, falls=True),
    "exponential": Shape(exponential, falls=True),
    "clip": Shape(clip, falls=False),
}


def _each(values: Sequence[float | None], shape: Callable[[float], float], what: str, least: float) -> Column:
    for index, value in enumerate(values):
        if value is not None and not (math.isfinite(value) and value >= least):
            bound = ", 0 or more" if least == 0 else ""
            raise ValueError(f"the value of sample {index} is {value}; {what} is a finite number{bound}, or None")
    return [None if value is None else shape(value) for value in values]


def _above_zero(a: float) -> None:
    if not (math.isfinite(a) and a > 0):
        raise ValueError(f"a is {a}; it must be a finite number above 0")
