"""What was written stays written, also when the power goes."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

THREADS = 8  # waiting for a disk leaves Python's lock


def to_disk(folder: Path) -> None:
    """Bring every file below a folder to the disk, and the names of all."""
    inside = list(folder.rglob("*"))
    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(_sync, (path for path in inside if path.is_file())))
    for path in (folder, *(path for path in inside if path.is_dir())):
        sync_folder(path)


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk: a renamed file is safe only then."""
    _sync(folder)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
