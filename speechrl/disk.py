"""Files that are whole, and stay written when the power goes; flags whose files can't be written."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

THREADS = 8  # waiting for a disk leaves Python's lock


def write_lines(path: str | Path, lines: Iterable[str]) -> None:
    """Write a text file in one move: whoever reads `path` sees the old file or the whole new one.

    Of a link it is the file behind it that is replaced; an old file's mode stays. Raises OSError.
    """
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name[:40]}.{uuid4().hex}")
    try:
        with partial.open("x", encoding="utf-8", newline="\n") as stream:
            stream.writelines(line + "\n" for line in lines)
            stream.flush()
            os.fsync(stream.fileno())
        if target.exists():
            shutil.copymode(target, partial)
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def writing(flag: str, path: str | Path) -> Iterator[None]:
    """An OSError of the block as a ValueError that names the flag which gave the path."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{flag} {path} can't be written: {error.strerror}") from error


def check_writable(flag: str, path: str | Path) -> None:
    """Raises ValueError now for a file that could not be written after hours of work. Makes its folder."""
    with writing(flag, path):
        if Path(path).exists() and not Path(path).is_file():
            raise ValueError(f"{flag} {path} can't be written: it exists and is no ordinary file")
        folder = Path(os.path.realpath(path)).parent
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()


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
