"""A folder's manifest of sizes and checksums: written last, so that a folder with a right one is whole."""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

MANIFEST = "manifest.json"
THREADS = 8  # hashing leaves Python's lock


def seal(folder: Path) -> None:
    """Bring every file of the folder to the disk and write its manifest."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    with ThreadPoolExecutor(THREADS) as threads:
        sums = list(threads.map(lambda name: _digest(folder / name, to_disk=True), names))
    files = {
        name: {"bytes": (folder / name).stat().st_size, "sha256": digest}
        for name, digest in zip(names, sums, strict=True)
    }
    with (folder / MANIFEST).open("w", encoding="utf-8") as stream:
        json.dump({"files": files}, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    for path in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        sync_folder(path)


def fault_of(folder: Path) -> str:
    """What is wrong with a sealed folder; "" when every file is there with its size and checksum."""
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        expected = {name: (entry["bytes"], entry["sha256"]) for name, entry in files.items()}
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} can't be read ({error})"
    for name, (size, _) in expected.items():  # sizes first: they cost nothing
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, {size} were written"
    with ThreadPoolExecutor(THREADS) as threads:
        found = {name: threads.submit(_digest, folder / name) for name in expected}
    for name, digest in found.items():
        try:
            if digest.result() != expected[name][1]:
                return f"the checksum of {name} is not the one that was written"
        except OSError as error:  # the disk itself has lost it
            return f"{name} can't be read: {error.strerror}"
    return ""


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk: a renamed file is safe only then."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _digest(path: Path, to_disk: bool = False) -> str:
    with path.open("rb") as stream:
        if to_disk:
            os.fsync(stream.fileno())
        return hashlib.file_digest(stream, "sha256").hexdigest()
