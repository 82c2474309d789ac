"""Answers of several Ray actors that yield them one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ray


def relayed(answers: Sequence[Any], relay: Callable[[int, Any], Any | None]) -> Iterator[Any]:
    """References that `relay` made of what the generators yield, as they get ready. A second actor works on one piece
    while the first makes the next: what is there is handed on before anything is handed out.

    answers: Ray's ObjectRefGenerators. relay: gets the generator's number and a reference to what it yielded, or to its
    error; None: nothing comes of it.
    """
    waiting: list[Any] = list(answers)
    relays: list[Any] = []
    while waiting or relays:
        ready = ray.wait([*waiting, *relays], num_returns=1)[0][0]  # of what is ready, the first
        if ready in relays:
            relays.remove(ready)
            yield ready
            continue
        try:
            answer = next(ready)
        except StopIteration:
            waiting.remove(ready)
            continue
        reference = relay(answers.index(ready), answer)
        if reference is not None:
            relays.append(reference)


def in_turn(answers: Sequence[Any]) -> Iterator[tuple[int, Any]]:
    """(number of the generator, reference to what it yielded, or to its error): one of each, round after round, an
    order that does not depend on time.
    """
    waiting = list(enumerate(answers))
    while waiting:
        for number, answer in list(waiting):
            try:
                yield number, next(answer)
            except StopIteration:
                waiting.remove((number, answer))
