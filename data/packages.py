"""Get one named package with its registry's own client and unpack it. Nothing is installed, no root is needed.

Debian packages come with apt-get, Python ones with pip or uv, whichever is there.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path


class PackageError(RuntimeError):
    """A package that can't be had. The message holds what the client said."""


def debian_package(name: str, cache: Path) -> Path:
    """The folder of an unpacked .deb, by its name alone; what lies in `cache` is not fetched again."""
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / f"{name}.unpacked"
    if folder.is_dir():
        return folder
    if not _find(cache, name):
        try:
            _run(["apt-get", "download", name], cache)
        except PackageError:  # a fresh machine has no lists of packages yet
            _run(["apt-get", "update"], cache)
            _run(["apt-get", "download", name], cache)
    archive = _find(cache, name)
    if archive is None:
        raise PackageError(f"apt-get downloaded {name}, but there is no {name}_*.deb in {cache}")
    partial = cache / f"{name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    _run(["dpkg-deb", "-x", str(archive.resolve()), str(partial.resolve())], cache)
    return partial.rename(folder)


def python_package(requirement: str, cache: Path) -> Path:
    """The folder of an unpacked NAME==VERSION without what it depends on; what lies in `cache` is not fetched again."""
    folder = cache / f"{requirement.replace('==', '-')}.unpacked"
    if folder.is_dir():
        return folder
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    options = ["--quiet", "--no-deps", "--only-binary=:all:", "--target", str(partial.resolve()), requirement]
    _run([*_installer(), *options], cache)
    return partial.rename(folder)


def _installer() -> list[str]:
    if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True, check=False).returncode == 0:
        return [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]
    private = Path(__file__).parent.parent / ".tools" / "uv" / "bin" / "uv"  # tools/setup.sh puts it there
    uv = shutil.which("uv") or (str(private) if private.is_file() else None)
    if uv is None:
        raise PackageError(f"neither pip (of {sys.executable}) nor uv is there: install one of them")
    return [uv, "pip", "install", "--python", sys.executable]


def _find(cache: Path, name: str) -> Path | None:
    return next(iter(sorted(cache.glob(f"{name}_*.deb"))), None)


def _run(command: list[str], folder: Path) -> None:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise PackageError(f"{command[0]} is not installed: {' '.join(command)} needs it") from error
    if done.returncode:
        raise PackageError(f"{' '.join(command)} failed: {(done.stderr or done.stdout).strip()[-500:]}")
