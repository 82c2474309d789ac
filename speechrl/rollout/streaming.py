"""Answers of several Ray actors that yield them one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import ray


def as_they_come(answers: Sequence[Any]) -> Iterator[tuple[int, Any]]:
    """(number of the generator, reference to what it yielded, or to its error), whoever is first.

    answers: Ray's ObjectRefGenerators.
    """
    waiting = dict(enumerate(answers))
    while waiting:
        ready, _ = ray.wait(list(waiting.values()), num_returns=1)
        number = next(number for number, answer in waiting.items() if answer is ready[0])
        try:
            yield number, next(ready[0])
        except StopIteration:
            del waiting[number]


def in_turn(answers: Sequence[Any]) -> Iterator[tuple[int, Any]]:
    """As `as_they_come`, in an order that does not depend on time: one of each, round after round."""
    waiting = list(enumerate(answers))
    while waiting:
        for number, answer in list(waiting):
            try:
                yield number, next(answer)
            except StopIteration:
                waiting.remove((number, answer))
