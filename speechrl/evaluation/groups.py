"""Evaluation sets, and the parts of a set that metrics are broken down by."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence

from speechrl.config import named_paths
from speechrl.data.mix import read_checked
from speechrl.data.text_rules import read_rules
from speechrl.evaluation.metrics import Decoded, Samples, pairs_of
from speechrl.sections import Decoding, Eval, Selection
from speechrl.types import Utterance

DURATION_EDGES_S = (2, 5, 10, 20)
NONE = "none"  # the value of an utterance that has no such key


def _duration_bucket(utterance: Utterance) -> str:
    """0-2s, 2-5s, 5-10s, 10-20s or 20s+: the lower edge belongs to the bucket."""
    if utterance.duration_s is None:
        return NONE
    place = bisect_right(DURATION_EDGES_S, utterance.duration_s)
    low = (0, *DURATION_EDGES_S)[place]
    return f"{low}s+" if place == len(DURATION_EDGES_S) else f"{low}-{DURATION_EDGES_S[place]}s"


KEYS: Mapping[str, Callable[[Utterance], str]] = {
    "language": lambda utterance: utterance.language or NONE,
    "duration": _duration_bucket,
}


def value_of(utterance: Utterance, key: str) -> str:
    """The part of --eval.group_by `key` that an utterance belongs to; other keys are the manifest's metadata."""
    if key in KEYS:
        return KEYS[key](utterance)
    value = utterance.metadata.get(key)
    return NONE if value is None else str(value)


def parts_of(groups: Sequence[Samples], key: str) -> dict[str, list[Samples]]:
    """value -> the utterances that have it, values in order; duration by length."""
    found: dict[str, list[Samples]] = {}
    for samples in groups:
        found.setdefault(value_of(samples[0].utterance, key), []).append(samples)
    return {value: found[value] for value in sorted(found, key=_order)}


def _order(value: str) -> tuple[bool, float, str]:
    """Numbers and durations by size, then all else by name; what has no such key comes last."""
    start = re.match(r"\d+", value)
    return (value == NONE, int(start[0]) if start else math.inf, value)


def read_sets(options: Decoding, data: Selection) -> dict[str, list[Utterance]]:
    """The checked utterances of every --eval.dataset. Raises ValueError for a --eval.group_by that no utterance has and
    for --eval.text_rules that mean nothing.
    """
    read_rules(options.text_rules, "--eval.text_rules")
    sets = {name: read_checked(path, data) for name, path in named_paths(options.dataset, "--eval.dataset").items()}
    if sets:
        _check_keys(options.group_by, [utterance for utterances in sets.values() for utterance in utterances])
    if isinstance(options, Eval) and options.best_metric:
        _check_best(options.best_metric, sets)
    return sets


def _check_best(best: str, sets: Mapping[str, Sequence[Utterance]]) -> None:
    """Raises ValueError for eval/NAME/[KEY=VALUE/]METRIC that no utterance of the set counts towards: its value would
    be missing at the first evaluation.
    """
    name, _, rest = best.removeprefix("eval/").partition("/")
    place, _, metric = rest.rpartition("/")  # a value may hold a slash
    said = [Decoded(item, "a", finish_reason="stop", reward=0.0) for item in sets[name]]
    groups: list[Samples] = [(item, item) for item in said]
    if place:
        key, _, value = place.partition("=")
        groups = parts_of(groups, key).get(value, [])
    if not any(pairs_of(samples)[metric][1] for samples in groups):
        raise ValueError(f"--eval.best_metric {best}: no utterance of {name} counts towards it")


def _check_keys(keys: Sequence[str], utterances: Iterable[Utterance]) -> None:
    metadata = {key for utterance in utterances for key in utterance.metadata}
    unknown = [key for key in keys if key not in KEYS and key not in metadata]
    if unknown:
        raise ValueError(
            f"--eval.group_by {unknown[0]}: no utterance has it; there are {', '.join([*KEYS, *sorted(metadata)])}"
        )
