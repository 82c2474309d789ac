"""Encoder outputs on disk (--data.feature_cache): computed once over steps, runs and models with the same encoder.

An entry is a safetensors file, DIR/<2 hex>/<key>.safetensors, whose key is the SHA-256 of the audio's bytes and of all
else that decides the output. Entries are written beside their place and renamed, so any number of processes may share
DIR, on a network file system too; one that is damaged is noticed by its checksum and deleted.

Why not diskcache: no release since 2023 and an open advisory on its pickles; its SQLite log needs all processes on one
host; and it returns a flipped bit as it is.

Shapes: A audio tokens of one utterance, D encoder width.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from speechrl.data.audio import audio_digest
from speechrl.models.family import Family, feature_extractor
from speechrl.models.load import LoadedModel, as_bytes, encoder_digest
from speechrl.sections import Selection
from speechrl.types import AudioRef

VERSION = 1  # of the way from a sound file to an encoder output; a change of it makes every old entry a miss
KEPT_SHARE = 0.8  # of the bound is kept when room is made; the rest is what all writers may add until one looks again
OURS = re.compile(r"[0-9a-f]{64}\.safetensors")  # nothing else in DIR is ever counted or deleted


@dataclass
class Counts:
    """Lookups since the last `FeatureCache.take_counts`. A damaged entry is a miss, too."""

    hits: int = 0
    misses: int = 0
    corrupt: int = 0


class FeatureCache:
    """Encoder outputs [A, D] by key, the least recently used ones deleted where they outgrow the bound.

    context: `encoder_context` of the model. limit_bytes: of all entries, never exceeded while at most `num_writers`
    processes write. Raises ValueError naming the flag where the folder can't be read or written, now and later.
    """

    def __init__(self, folder: str, limit_bytes: int, context: str, num_writers: int = 1):
        make_folder(folder)
        self.folder, self.limit_bytes, self.context = Path(folder), limit_bytes, context
        self._allowance_bytes = (1 - KEPT_SHARE) * limit_bytes / num_writers  # of this process between two looks
        self._written_bytes = self._allowance_bytes  # so the first entry looks at what is there
        self._counts = Counts()

    def key(self, audio: AudioRef, where: str = "") -> str:
        """Hex SHA-256. Raises AudioError naming the file when it can't be read."""
        return hashlib.sha256(f"{self.context} {audio_digest(audio, where)}".encode()).hexdigest()

    def get(self, key: str) -> Tensor | None:
        """The output, on the CPU; None where there is none or a damaged one, which is deleted and counted."""
        path = self._path(key)
        with _naming_the_flag(self.folder):
            try:
                data = path.read_bytes()
            except FileNotFoundError:
                self._counts.misses += 1
                return None
            output = _parse(key, data)
            if output is None:
                path.unlink(missing_ok=True)
                self._counts.misses += 1
                self._counts.corrupt += 1
                return None
            with suppress(FileNotFoundError):  # somebody made room in between
                os.utime(path)
        self._counts.hits += 1
        return output

    def put(self, key: str, output_AD: Tensor) -> None:
        """Keep an output. Who writes last wins: all write the same."""
        output_AD = output_AD.detach().cpu().contiguous()
        checksum = torch.tensor(list(_checksum(key, output_AD)), dtype=torch.uint8)
        data = save({"output": output_AD, "checksum": checksum})
        path = self._path(key)
        part = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
        with _naming_the_flag(self.folder):
            if self._written_bytes + len(data) > self._allowance_bytes:
                self._make_room()
            self._written_bytes += len(data)
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                # no fsync: what a power cut leaves is told by its checksum
                part.write_bytes(data)
                with suppress(FileNotFoundError):  # somebody made room for more than all that is older
                    os.replace(part, path)
            finally:
                part.unlink(missing_ok=True)

    def take_counts(self) -> Counts:
        """Lookups since the last call."""
        counts, self._counts = self._counts, Counts()
        return counts

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.safetensors"

    def _make_room(self) -> None:
        """Delete the least recently used entries down to KEPT_SHARE. Others may do the same at the same time."""
        entries = sorted(self._entries())
        total_bytes = sum(size for _, size, _ in entries)
        for _, size, path in entries:
            if total_bytes <= KEPT_SHARE * self.limit_bytes:
                break
            with suppress(FileNotFoundError):
                os.unlink(path)
            total_bytes -= size
        self._written_bytes = 0.0

    def _entries(self) -> Iterator[tuple[int, int, str]]:
        """(time of last use in ns, bytes, path) of every entry, and of what a killed process left of one."""
        for folder in self.folder.glob("[0-9a-f][0-9a-f]"):
            with os.scandir(folder) as files:
                for file in files:
                    if OURS.match(file.name):
                        with suppress(FileNotFoundError):
                            stat = file.stat()
                            yield stat.st_mtime_ns, stat.st_size, file.path


def encoder_context(loaded: LoadedModel, encoder: nn.Module) -> str:
    """Hex SHA-256 of all but the audio that decides an encoder's output: weights and their format, the configs of
    encoder and feature extractor, the family, transformers' version (whose code both are) and VERSION.

    Device and attention kernel are left out: they differ by rounding, which is no reason to compute again.
    """
    facts = (
        str(VERSION),
        transformers.__version__,
        loaded.family.name,
        str(next(encoder.parameters()).dtype),
        encoder_digest(encoder),
        encoder.config.to_json_string(),
        feature_extractor(loaded.processor).to_json_string(),
    )
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()


def check_feature_cache(data: Selection, family: Family, here: bool = True) -> None:
    """Raises ValueError when --data.feature_cache is given and nothing could be kept. here: DIR is on this machine."""
    if not data.feature_cache:
        return
    if not family.has_audio:
        raise ValueError(
            f"--data.feature_cache {data.feature_cache}: the model ({family.name}) has no audio encoder; leave it out"
        )
    if here:
        make_folder(data.feature_cache)


def make_folder(folder: str) -> None:
    """Make the folder if it is missing. Raises ValueError naming the flag when files can't be written there."""
    with _naming_the_flag(folder):
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass


@contextmanager
def _naming_the_flag(folder: str | Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"--data.feature_cache {folder}: can't be used ({error}); give a folder with room that may be written, or "
            "lower --data.feature_cache_gb"
        ) from error


def _parse(key: str, data: bytes) -> Tensor | None:
    """The output of an entry; None if it is damaged."""
    try:
        tensors = load(data)
        output, checksum = tensors["output"], tensors["checksum"]
    except (SafetensorError, KeyError):
        return None
    return output if as_bytes(checksum) == _checksum(key, output) else None


def _checksum(key: str, output: Tensor) -> bytes:
    """SHA-256 of the bytes with their dtype, shape and name: safetensors itself checks only that the sizes fit."""
    head = f"{key} {output.dtype} {tuple(output.shape)} ".encode()
    return hashlib.sha256(head + as_bytes(output)).digest()
