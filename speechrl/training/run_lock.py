"""One run at a time in a folder: a lock that ends with its process, however that ends."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from pathlib import Path
from typing import TextIO

NAME = "lock"


def holder_of(folder: Path) -> str:
    """The process that holds the folder, in words; "" if none does."""
    try:
        with (folder / NAME).open("r+", encoding="utf-8") as stream:
            return "" if _locked(stream) else stream.read()
    except OSError:
        return ""


def take(folder: Path) -> TextIO | None:
    """The lock, held while the file stays open; None where another process has it."""
    stream = (folder / NAME).open("a+", encoding="utf-8")
    if not _locked(stream):
        stream.close()
        return None
    stream.truncate(0)
    stream.write(f"process {os.getpid()} on {socket.gethostname()}")
    stream.flush()
    return stream


def _locked(stream: TextIO) -> bool:
    """Whether the lock could be had. A child of this process does not hold it, so that no Ray process keeps it."""
    try:
        fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN)  # others: a file system without locks
    return True
