"""SIGINT (Ctrl-C) and SIGTERM (a queue takes the machine back): what a run makes of them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOPPING = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def first_only_tells(tell: Callable[[str], None]) -> Iterator[None]:
    """The first of these signals calls `tell` with its name; a second one does what it did before, and so does any
    once the block is left.
    """
    before = {number: signal.getsignal(number) or signal.SIG_DFL for number in STOPPING}
    mine = [number for number in STOPPING if before[number] != signal.SIG_IGN]  # nohup ignores Ctrl-C, and so do we

    def restore() -> None:
        for number in mine:
            signal.signal(number, before[number])

    def first(number: int, frame: FrameType | None) -> None:
        restore()
        name = signal.Signals(number).name
        # print may be what was interrupted
        os.write(2, f"{name}: the run stops once this step is done; again to stop at once\n".encode())
        tell(name)

    if threading.current_thread() is not threading.main_thread():  # Python lets no other thread set handlers
        yield
        return
    for number in mine:
        signal.signal(number, first)
    try:
        yield
    finally:
        restore()
