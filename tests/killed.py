"""`python -m tests.killed VICTIM POINT NUMBER COMMAND flags...`: a command in whose middle a process is killed.

VICTIM: driver, or the number of a policy rank. POINT: stream, update or save_checkpoint. NUMBER: which call, from 1.
The kill (SIGKILL) comes once the ranks are at work on that call, before any has answered; of stream after a piece.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import ray

from speechrl import cli
from speechrl.training import group


def main() -> None:
    victim, point, number, *command = sys.argv[1:]
    plain_call, plain_gather = getattr(group.PolicyGroup, point), group.gather
    state: dict[str, Any] = {"calls": 0, "kill": False, "ranks": []}

    def counted(self: Any, *arguments: Any) -> Any:
        state["calls"] += 1
        state["kill"] = state["calls"] == int(number)
        state["ranks"] = self.ranks
        if state["kill"] and victim != "driver":
            state["pid"] = ray.get(self.ranks[int(victim)].__ray_call__.remote(lambda rank: os.getpid()))
        answer = plain_call(self, *arguments)
        return dying(answer) if state["kill"] and point == "stream" else answer

    def dying(pieces: Iterator[Any]) -> Iterator[Any]:
        yield next(pieces)
        os.kill(os.getpid() if victim == "driver" else state["pid"], signal.SIGKILL)
        yield from pieces

    def gather(calls: Any) -> Any:
        if state["kill"] and point != "stream" and len(calls) == len(state["ranks"]):
            time.sleep(0.02)
            os.kill(os.getpid() if victim == "driver" else state["pid"], signal.SIGKILL)
        return plain_gather(calls)

    setattr(group.PolicyGroup, point, counted)
    group.gather = gather  # type: ignore[assignment]
    cli.main(command)


if __name__ == "__main__":
    main()
