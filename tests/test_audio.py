"""Decoding and the checks before a run, against tones whose samples are known."""

from __future__ import annotations

from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pytest
import soundfile

from speechrl.data.audio import AudioError, audio_digest, duration_s_of, load_audio, samples_of, write_wav
from speechrl.data.checks import check_utterances
from speechrl.types import AudioRef, Utterance

HZ = 440.0


def tone(duration_s: float, rate_hz: int, hz: float = HZ) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * hz * np.arange(samples_of(duration_s, rate_hz)) / rate_hz)).astype(np.float32)


def difference(found: np.ndarray, wanted: np.ndarray) -> float:
    """RMS difference without the edges, where a codec or a resampler rings; relative to a tone of RMS 0.354."""
    inner = slice(len(wanted) // 10, -len(wanted) // 10)
    return float(np.sqrt(np.mean((found[inner] - wanted[inner]) ** 2)) / 0.354)


@pytest.mark.parametrize(
    ("suffix", "subtype", "tolerance"),
    [
        ("wav", "PCM_16", 1e-4),
        ("wav", "FLOAT", 1e-7),
        ("flac", "PCM_16", 1e-4),
        ("ogg", "VORBIS", 0.05),
        ("opus", "OPUS", 0.05),
        ("mp3", "MPEG_LAYER_III", 0.05),
    ],
)
def test_formats(tmp_path: Path, suffix: str, subtype: str, tolerance: float) -> None:
    path, wanted = tmp_path / f"a.{suffix}", tone(1.0, 16000)
    kind = {"opus": "OGG"}.get(suffix, suffix.upper())
    soundfile.write(path, wanted, 16000, subtype=subtype, format=kind)
    found = load_audio(AudioRef(str(path)))
    assert found.dtype == np.float32 and found.ndim == 1
    assert abs(len(found) - 16000) <= (1200 if suffix == "mp3" else 0)  # an mp3 encoder may pad to whole frames
    if len(found) == 16000:
        assert difference(found, wanted) < tolerance
    else:  # the padding shifts the tone, so compare the spectrum's peak
        assert np.argmax(np.abs(np.fft.rfft(found[:16000]))) == 440
    assert duration_s_of(AudioRef(str(path))) == pytest.approx(len(found) / 16000, abs=1e-6)


@pytest.mark.parametrize("source_hz", [8000, 22050, 44100])
def test_rates(tmp_path: Path, source_hz: int) -> None:
    path = tmp_path / "a.wav"
    write_wav(path, tone(0.5, source_hz), source_hz)
    found = load_audio(AudioRef(str(path)), 16000)
    assert len(found) == 8000
    assert difference(found, tone(0.5, 16000)) < 2e-3
    assert len(load_audio(AudioRef(str(path)), source_hz)) == source_hz // 2
    assert duration_s_of(AudioRef(str(path))) == 0.5


def test_channels_are_averaged(tmp_path: Path) -> None:
    left, right = tone(0.2, 16000, 300), tone(0.2, 16000, 700)
    soundfile.write(tmp_path / "a.wav", np.stack([left, right], axis=1), 16000, subtype="FLOAT")
    np.testing.assert_allclose(load_audio(AudioRef(str(tmp_path / "a.wav"))), (left + right) / 2, atol=1e-7)


def test_one_conversion_rounds_half_up() -> None:
    assert 1.1 * 3 * 16000 == 52800.00000000001 and samples_of(1.1 * 3, 16000) == 52800
    assert int(0.29 * 100) == 28 and samples_of(0.29, 100) == 29  # what truncation loses
    assert [samples_of(value, 1) for value in (0.5, 1.5, 2.49)] == [1, 2, 2]


def test_bad_audio_names_the_file(tmp_path: Path) -> None:
    def error(path: Path) -> str:
        with pytest.raises(AudioError) as caught:
            load_audio(AudioRef(str(path)), where="m.jsonl:3")
        assert str(caught.value).startswith(f"m.jsonl:3: {path}: ")
        return str(caught.value)

    assert "no such file" in error(tmp_path / "missing.wav")
    assert "is a folder" in error(tmp_path)
    (tmp_path / "text.wav").write_bytes(b"RIFFnonsense" * 20)
    assert "can't be read as audio" in error(tmp_path / "text.wav")
    (tmp_path / "a.raw").write_bytes(b"\0" * 100)
    assert "can't be read as audio" in error(tmp_path / "a.raw")
    (tmp_path / "nothing.wav").write_bytes(b"")
    assert "can't be read as audio" in error(tmp_path / "nothing.wav")
    soundfile.write(tmp_path / "empty.wav", np.zeros(0, np.float32), 16000)
    assert "no samples (zero length)" in error(tmp_path / "empty.wav")
    soundfile.write(tmp_path / "nan.wav", np.array([0, np.nan, np.inf, 0], np.float32), 16000, subtype="FLOAT")
    assert "2 samples are NaN or infinite" in error(tmp_path / "nan.wav")
    soundfile.write(tmp_path / "loud.wav", np.array([0, 20000.0], np.float32), 16000, subtype="FLOAT")
    assert "samples up to 20000" in error(tmp_path / "loud.wav")
    soundfile.write(tmp_path / "cut.flac", np.random.default_rng(0).uniform(-0.5, 0.5, 16000), 16000)
    (tmp_path / "cut.flac").write_bytes((tmp_path / "cut.flac").read_bytes()[:9000])
    assert "cut short" in error(tmp_path / "cut.flac") or "can't be decoded" in error(tmp_path / "cut.flac")


def test_a_decoder_that_overshoots_is_limited(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", np.array([1.25, -1.5, 0.5], np.float32), 16000, subtype="FLOAT")
    assert load_audio(AudioRef(str(tmp_path / "a.wav"))).tolist() == [1.0, -1.0, 0.5]


def test_write_wav(tmp_path: Path) -> None:
    samples = tone(0.1, 16000)
    for name, kind in (("a.wav", "WAV"), ("a.flac", "FLAC")):
        write_wav(tmp_path / name, samples, 16000)
        info = soundfile.info(tmp_path / name)
        assert (info.format, info.subtype, info.frames, info.samplerate) == (kind, "PCM_16", 1600, 16000)
        assert np.abs(load_audio(AudioRef(str(tmp_path / name))) - samples).max() <= 1 / 32768
    for bad in (np.array([1.5]), np.array([np.nan]), np.zeros((2, 2)), np.zeros(0)):
        with pytest.raises(AudioError, match=r"bad.wav"):
            write_wav(tmp_path / "bad.wav", bad, 16000)
    assert not (tmp_path / "bad.wav").exists()


@pytest.mark.parametrize("embedded", [True, False])
def test_rows_of_a_dataset(tmp_path: Path, embedded: bool) -> None:
    paths = [tmp_path / "a.wav", tmp_path / "b.flac"]
    clips = [tone(0.3, 16000), tone(0.4, 8000)]
    write_wav(paths[0], clips[0], 16000)
    write_wav(paths[1], clips[1], 8000)
    audio = [{"bytes": path.read_bytes() if embedded else None, "path": str(path)} for path in paths]
    table = {"audio": pa.array([*audio, None], datasets.Audio().pa_type), "text": pa.array(["a", "b", "c"])}
    dataset = datasets.Dataset(pa.table(table)).cast_column("audio", datasets.Audio())
    folder = str(tmp_path / "corpus")
    dataset.save_to_disk(folder)
    if embedded:
        for path in paths:
            path.unlink()
    assert np.abs(load_audio(AudioRef(folder, 0)) - clips[0]).max() <= 1 / 32768
    assert len(load_audio(AudioRef(folder, 1))) == 6400
    assert duration_s_of(AudioRef(folder, 1)) == 0.4
    with pytest.raises(AudioError, match=r"corpus\[2\]: the row has no audio"):
        load_audio(AudioRef(folder, 2))
    with pytest.raises(AudioError, match=r"corpus\[9\]: the dataset has 3 rows"):
        load_audio(AudioRef(folder, 9))


def utterance(path: Path, line: int, duration_s: float | None = None) -> Utterance:
    return Utterance(f"u{line}", "x", AudioRef(str(path)), duration_s=duration_s, where=f"m.jsonl:{line}")


@pytest.fixture
def mixed(tmp_path: Path) -> list[Utterance]:
    """Lines 1 and 2 are good; 3 is missing, 4 corrupt, 5 too short, 6 too long, 7 not what the manifest says."""
    for name, duration_s in (("good", 1.0), ("short", 0.05), ("long", 3.0)):
        write_wav(tmp_path / f"{name}.wav", tone(duration_s, 16000), 16000)
    (tmp_path / "corrupt.wav").write_bytes(b"no sound")
    names = ["good", "missing", "corrupt", "short", "long"]
    rows = [utterance(tmp_path / f"{name}.wav", line) for line, name in enumerate(names, start=2)]
    text = Utterance("u1", "2", prompt="1+1=", where="m.jsonl:1")
    return [text, *rows, utterance(tmp_path / "good.wav", 7, duration_s=0.5)]


def test_skip_returns_the_good_ones_and_every_problem(mixed: list[Utterance]) -> None:
    good, problems = check_utterances(mixed, min_duration_s=0.1, max_duration_s=2.0, on_error="skip")
    assert [u.id for u in good] == ["u1", "u2"]
    assert good[1].duration_s == 1.0  # measured, for the manifest did not say
    assert [line.split(": ")[0] for line in problems] == [f"m.jsonl:{line}" for line in (3, 4, 5, 6, 7)]
    wanted = ["no such file", "can't be read", "--data.min_duration_s 0.1", "--data.max_duration_s 2", "says 0.500 s"]
    assert all(part in line for part, line in zip(wanted, problems, strict=True))


def test_stop_names_the_first_and_counts_the_others(mixed: list[Utterance]) -> None:
    bounds = {"min_duration_s": 0.1, "max_duration_s": 2.0}
    with pytest.raises(
        ValueError, match=r"^m.jsonl:3: utterance u3: .*missing.wav: no such file.*4 other bad ones of 7"
    ):
        check_utterances(mixed, on_error="stop", **bounds)
    with pytest.raises(
        ValueError, match=r"^m.jsonl:6: .*lasts 3.000 s, above --data.max_duration_s 2; .*on_error skip$"
    ):
        check_utterances([mixed[1], mixed[5]], on_error="stop", **bounds)
    good, problems = check_utterances(mixed[:2], on_error="stop", **bounds)
    assert (len(good), problems) == (2, [])
    with pytest.raises(ValueError, match=r"--data.on_error is 'ignore'"):
        check_utterances(mixed, on_error="ignore", **bounds)  # type: ignore[arg-type]


def test_decode_finds_what_a_header_hides(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "nan.wav", np.full(16000, np.nan, np.float32), 16000, subtype="FLOAT")
    rows = [utterance(tmp_path / "nan.wav", 1)]
    bounds = {"min_duration_s": 0.1, "max_duration_s": 2.0, "on_error": "skip"}
    assert len(check_utterances(rows, **bounds)[0]) == 1
    good, problems = check_utterances(rows, decode=True, **bounds)
    assert good == [] and "16000 samples are NaN" in problems[0]


@pytest.mark.parametrize(
    ("name", "subtype"),
    [("a.wav", "PCM_16"), ("a.flac", "PCM_16"), ("a.ogg", "VORBIS"), ("a.ogg", "OPUS"), ("a.mp3", None)],
)
def test_a_segment_is_that_part_of_the_whole(name: str, subtype: str | None, tmp_path: Path) -> None:
    path, rate_hz = tmp_path / name, 22050 if name == "a.flac" else 16000
    sweep = 0.5 * np.sin(2 * np.pi * np.cumsum(np.linspace(100, 900, 3 * rate_hz)) / rate_hz)
    soundfile.write(path, sweep.astype(np.float32), rate_hz, subtype=subtype)
    whole = load_audio(AudioRef(str(path)), rate_hz)
    part = load_audio(AudioRef(str(path), None, 1.25, 0.8), rate_hz)
    start = samples_of(1.25, rate_hz)
    assert len(part) == round(0.8 * rate_hz)
    tolerance = 0.0 if subtype == "PCM_16" else 1e-3
    np.testing.assert_allclose(part, whole[start : start + len(part)], atol=tolerance)
    assert duration_s_of(AudioRef(str(path), None, 1.25, 0.8)) == pytest.approx(0.8, abs=1e-4)


def test_a_segment_must_lie_in_its_recording(tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    soundfile.write(path, np.full(32000, 0.1, np.float32), 16000)
    assert len(load_audio(AudioRef(str(path), None, 1.5, 0.9))) == 8000  # cut at the end
    assert duration_s_of(AudioRef(str(path), None, 1.5, 0.9)) == 0.5
    cut = Utterance(id="u", text="", audio=AudioRef(str(path), None, 1.5, 0.9), duration_s=0.9)
    (checked,), _ = check_utterances([cut], min_duration_s=0.1, max_duration_s=30, on_error="stop")
    assert checked.duration_s == 0.5
    for start_s, length_s, end in ((1.5, 1.1, "2.600"), (2.0, 0.1, "2.100")):
        with pytest.raises(AudioError, match=rf"m:3: .*a.wav@.*lasts 2.000 s, the segment ends at {end} s"):
            load_audio(AudioRef(str(path), None, start_s, length_s), where="m:3")


def test_segments_of_one_recording_have_digests_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    soundfile.write(path, np.full(32000, 0.1, np.float32), 16000)
    refs = [AudioRef(str(path)), AudioRef(str(path), None, 0.0, 1.0), AudioRef(str(path), None, 1.0, 1.0)]
    digests = [audio_digest(ref) for ref in refs]
    assert len(set(digests)) == 3 and digests == [audio_digest(ref) for ref in refs]
    soundfile.write(path, np.full(32001, 0.1, np.float32), 16000)
    assert not set(digests) & {audio_digest(ref) for ref in refs}
