"""Sound files -> mono float32 at one rate. wav, flac, ogg (vorbis, opus) and mp3 through libsndfile."""

from __future__ import annotations

import functools
import hashlib
import io
import math
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import soxr

from speechrl.types import AudioRef

_SHORT_DATA = re.compile(r"^data : (\d+) \(should be (\d+)\)", re.MULTILINE)  # of a wav
STREAMED_BYTES = 2**31 - 2**16  # a wav written to a pipe states a size near 2^31 or 2^32: unknown
WARM_UP_S = 1.0  # what a codec gives right behind a seek is not yet the recording
MAX_OVERSHOOT_S = 0.5  # a segment may end so far behind its recording, and is cut there (as Kaldi's extract-segments)
BLOCK_SAMPLES = 2**20  # a minute at 16 kHz
LARGEST_SAMPLE = 4.0  # decoders overshoot 1 a little; beyond this the file was never scaled to [-1, 1]


class AudioError(ValueError):
    """Audio that can't be used. The message names the file."""


def samples_of(duration_s: float, rate_hz: int) -> int:
    """Samples in `duration_s` seconds, half rounded up: the one conversion (truncation would lose a sample)."""
    return math.floor(duration_s * rate_hz + 0.5)


def load_audio(ref: AudioRef, rate_hz: int = 16000, where: str = "") -> np.ndarray:
    """float32 [N samples] in [-1, 1] at `rate_hz`: channels averaged, any source rate resampled. Of a segment nothing
    else is decoded.

    where: file:line of the manifest, for messages. Raises AudioError naming the file when it is missing, unreadable,
    cut short, empty, not finite or not scaled to [-1, 1], or where a segment does not lie in it.
    """
    with _open(ref, where) as sound:
        start, wanted = _extent(sound, ref, where)
        warm_up = min(start, samples_of(WARM_UP_S, sound.samplerate) if sound.format in ("MP3", "OGG") else 0)
        try:
            if start:
                sound.seek(start - warm_up)
            count = None if ref.start_s is None else warm_up + wanted
            samples_NC = _read_blocks(sound, count)[warm_up:]
        except soundfile.SoundFileError as error:
            raise AudioError(f"{_name(ref, where)}: can't be decoded ({error})") from error
        if sound.format != "MP3" and len(samples_NC) < wanted:  # an mp3 header only estimates
            raise AudioError(f"{_name(ref, where)}: cut short, {len(samples_NC)} of {wanted} samples are there")
        source_hz = sound.samplerate
    if len(samples_NC) == 0:
        raise AudioError(f"{_name(ref, where)}: no samples (zero length)")
    samples = samples_NC.mean(axis=1)
    if not np.isfinite(samples).all():
        raise AudioError(f"{_name(ref, where)}: {(~np.isfinite(samples)).sum()} samples are NaN or infinite")
    peak = float(np.abs(samples).max())
    if peak > LARGEST_SAMPLE:
        raise AudioError(f"{_name(ref, where)}: samples up to {peak:g}; a float file must be scaled to [-1, 1]")
    if source_hz != rate_hz:
        samples = soxr.resample(samples, source_hz, rate_hz)
        if len(samples) == 0:
            raise AudioError(f"{_name(ref, where)}: shorter than one sample at {rate_hz} Hz")
    return np.clip(samples, -1.0, 1.0).astype(np.float32, copy=False)


def _read_blocks(sound: soundfile.SoundFile, count: int | None) -> np.ndarray:
    """float32 [N samples, C channels], at most `count`, block by block: a header may state more than memory holds."""
    blocks, left = [], count
    while left is None or left > 0:
        block_NC = sound.read(BLOCK_SAMPLES if left is None else min(left, BLOCK_SAMPLES), "float32", always_2d=True)
        if not len(block_NC):
            break
        blocks.append(block_NC)
        left = None if left is None else left - len(block_NC)
    return np.concatenate(blocks) if blocks else np.zeros((0, sound.channels), np.float32)


def audio_digest(ref: AudioRef, where: str = "") -> str:
    """Hex SHA-256 of the bytes of a sound file, or of a dataset's row, and of the segment's place; nothing is decoded.

    Raises AudioError naming the file when it is missing or unreadable.
    """
    source = _source(ref, where)
    if isinstance(source, bytes):
        digest = hashlib.sha256(source).hexdigest()
    else:
        try:
            if ref.start_s is None:
                digest = _file_digest(source)
            else:  # many segments share a long recording, which is read once
                facts = os.stat(source)
                digest = _recording_digest(source, facts.st_mtime_ns, facts.st_size)
        except OSError as error:
            raise AudioError(f"{_name(ref, where)}: can't be read ({error.strerror})") from error
    if ref.start_s is None:
        return digest
    return hashlib.sha256(f"{digest} {ref.start_s!r} {ref.length_s!r}".encode()).hexdigest()


def _file_digest(path: str) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@functools.lru_cache(maxsize=4096)
def _recording_digest(path: str, mtime_ns: int, num_bytes: int) -> str:
    """Of a file in the state that time and size of its last change tell."""
    return _file_digest(path)


def duration_s_of(ref: AudioRef, where: str = "") -> float:
    """Seconds according to the header, of the segment if one is meant; nothing is decoded.

    Raises AudioError when the header can't be read, or where the segment does not lie in the recording.
    """
    with _open(ref, where) as sound:
        return _extent(sound, ref, where)[1] / sound.samplerate


def write_wav(path: str | Path, samples: np.ndarray, rate_hz: int) -> None:
    """Write mono samples in [-1, 1] as 16-bit PCM; a path that ends in .flac is written as FLAC, losslessly smaller.

    Raises AudioError when the samples are not one channel, not finite or beyond [-1, 1], where they would clip.
    """
    if samples.ndim != 1 or len(samples) == 0:
        raise AudioError(f"{path}: samples of shape {samples.shape}; one channel [N] with N > 0 is needed")
    if not np.isfinite(samples).all() or np.abs(samples).max() > 1.0:
        raise AudioError(f"{path}: samples must be finite and within [-1, 1]")
    kind = "FLAC" if str(path).endswith(".flac") else "WAV"
    soundfile.write(str(path), samples, rate_hz, subtype="PCM_16", format=kind)


def _name(ref: AudioRef, where: str) -> str:
    return f"{where}: {ref}" if where else str(ref)


def _extent(sound: soundfile.SoundFile, ref: AudioRef, where: str) -> tuple[int, int]:
    """(first sample, number of samples) that are meant, at the file's rate. Raises AudioError beyond the file's end."""
    if ref.start_s is None or ref.length_s is None:
        return 0, sound.frames
    rate_hz, recording_s = sound.samplerate, sound.frames / sound.samplerate
    start = samples_of(ref.start_s, rate_hz)
    end = start + samples_of(ref.length_s, rate_hz)
    if start >= sound.frames or end > sound.frames + samples_of(MAX_OVERSHOOT_S, rate_hz):
        raise AudioError(
            f"{_name(ref, where)}: the recording lasts {recording_s:.3f} s, the segment ends at "
            f"{ref.start_s + ref.length_s:.3f} s; `offset_s` and `duration_s` are seconds of this recording"
        )
    return start, min(end, sound.frames) - start


def _open(ref: AudioRef, where: str) -> soundfile.SoundFile:
    source = _source(ref, where)
    try:
        sound = soundfile.SoundFile(io.BytesIO(source) if isinstance(source, bytes) else source)
    except (soundfile.SoundFileError, OSError, TypeError) as error:  # TypeError: headerless formats ask for a rate
        raise AudioError(
            f"{_name(ref, where)}: can't be read as audio ({error}); wav, flac, ogg, opus and mp3 are, others need "
            "`ffmpeg -i FILE -ac 1 -ar 16000 FILE.flac`"
        ) from error
    short = _SHORT_DATA.search(sound.extra_info)  # libsndfile lowers `frames` to what is there, and only logs it
    if short and int(short[2]) < int(short[1]) < STREAMED_BYTES:
        sound.close()
        raise AudioError(f"{_name(ref, where)}: cut short, {short[2]} of {short[1]} bytes are there")
    return sound


def _source(ref: AudioRef, where: str) -> bytes | str:
    """Encoded sound, or the path of a file that is there."""
    source = _row_source(ref, where) if ref.row is not None else ref.path
    if isinstance(source, str) and not os.path.isfile(source):
        what = "is a folder" if os.path.isdir(source) else "no such file"
        raise AudioError(
            f"{_name(ref, where)}: {what}; `audio` is a file, relative to the manifest's folder or absolute"
        )
    return source


def _row_source(ref: AudioRef, where: str) -> bytes | str:
    """The bytes of a dataset's row, or the path that the row holds."""
    dataset = _audio_column(ref.path)
    if not 0 <= (ref.row or 0) < len(dataset):
        raise AudioError(f"{_name(ref, where)}: the dataset has {len(dataset)} rows")
    audio = dataset[ref.row]["audio"]
    if audio is None or not (audio["bytes"] or audio["path"]):
        raise AudioError(f"{_name(ref, where)}: the row has no audio")
    return audio["bytes"] or os.path.join(ref.path, audio["path"])


@functools.lru_cache(maxsize=16)
def _audio_column(path: str) -> Any:
    import datasets  # takes a second to import; most manifests are JSONL

    try:
        dataset = datasets.load_from_disk(path).select_columns("audio")
    except (FileNotFoundError, ValueError) as error:
        raise AudioError(f"{path}: no dataset with an `audio` column ({error})") from error
    return dataset.cast_column("audio", datasets.Audio(decode=False))
