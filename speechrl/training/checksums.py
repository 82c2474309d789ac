"""A folder's manifest of sizes and checksums: written last, so that a folder with a right one is whole."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from speechrl.disk import to_disk

MANIFEST = "manifest.json"
THREADS = 8  # hashing leaves Python's lock


def seal(folder: Path) -> None:
    """Write a folder's manifest, and bring everything in it to the disk."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    with ThreadPoolExecutor(THREADS) as threads:
        sums = list(threads.map(lambda name: _digest(folder / name), names))
    files = {
        name: {"bytes": (folder / name).stat().st_size, "sha256": digest}
        for name, digest in zip(names, sums, strict=True)
    }
    (folder / MANIFEST).write_text(json.dumps({"files": files}, indent=1), encoding="utf-8")
    to_disk(folder)


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


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
