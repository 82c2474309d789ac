"""Whatever comes in from outside is used or refused with a clear error; nothing else may happen."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from speechrl.config import TrainConfig, parse
from speechrl.data.audio import AudioError, duration_s_of, load_audio, write_wav
from speechrl.data.manifest import ManifestError, read_manifest
from speechrl.reward.plugin import RewardError, check_answer
from speechrl.training.checksums import fault_of
from speechrl.types import AudioRef

FUZZ = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=8),
    st.just("打开\u0000\ud7ff"),
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)
KEYS = st.sampled_from(["id", "text", "audio", "prompt", "language", "keywords", "duration_s", "duration", "x"])


@FUZZ
@given(rows=st.lists(st.dictionaries(KEYS, VALUES, max_size=6), max_size=4), tail=st.binary(max_size=20))
@example(rows=[{"text": "a", "audio": "a\u0000.wav"}], tail=b"")
@example(rows=[{"text": "a", "id": True}], tail=b"\xff\xfe")
@example(rows=[{"text": "a", "duration_s": 10**400}], tail=b"[" * 5000)
def test_manifests(rows: list[dict], tail: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.jsonl"
    path.write_bytes(b"\n".join(json.dumps(row).encode() for row in rows) + b"\n" + tail)
    try:
        utterances = read_manifest(path)
    except ManifestError as error:
        assert "fuzz.jsonl" in str(error)
        return
    for utterance in utterances:
        assert isinstance(utterance.text, str) and utterance.id
        assert utterance.duration_s is None or (math.isfinite(utterance.duration_s) and utterance.duration_s > 0)


@pytest.fixture(scope="module")
def sounds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("sounds")
    samples = 0.3 * np.sin(np.arange(1600, dtype=np.float32) / 9)
    for name in ("a.wav", "a.flac"):
        write_wav(folder / name, samples, 16000)
    return {name: (folder / name).read_bytes() for name in ("a.wav", "a.flac")}


@FUZZ
@example(kind="a.flac", changes=[(22, 189)], keep=42)  # a header that states hours
@given(
    kind=st.sampled_from(["a.wav", "a.flac"]),
    changes=st.lists(st.tuples(st.integers(0, 79), st.integers(0, 255)), max_size=6),
    keep=st.integers(0, 4000),
)
def test_audio_headers(
    kind: str, changes: list[tuple[int, int]], keep: int, sounds: dict, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = bytearray(sounds[kind])
    for place, byte in changes:
        content[place] = byte
    path = tmp_path_factory.getbasetemp() / f"fuzz_{kind}"
    path.write_bytes(bytes(content[:keep]))
    for read in (load_audio, duration_s_of):
        with contextlib.suppress(AudioError):
            result: Any = read(AudioRef(str(path)), where="m.jsonl:1")
            if read is load_audio:
                assert result.dtype == np.float32 and np.isfinite(result).all() and len(result) > 0
            else:
                assert math.isfinite(result) and result >= 0


BAD_YAML = [
    "{",
    "a: [",
    "- 1\n- 2",
    "a: 1\na: 2",
    "&a [*a]",
    "? [1]\n: 2",
    "? {a: 1}\n: 2",
    "!!x",
    "train: {? [a] : 1}",
]
ARGUMENTS = ["--train.seed", "--actor.freeze", "1e9", "x", "--ckpt.resume", "=", "--", "--config"]
SECTIONS = st.sampled_from(["actor", "data", "train", "rollout", "algo", "reward", "ckpt", "vllm", "nonsense"])
NAMES = st.sampled_from(["lr", "batch_size", "seed", "model_name_or_path", "max_steps", "advantage", "freeze", "x"])


@FUZZ
@given(tree=st.dictionaries(SECTIONS, st.dictionaries(NAMES, VALUES, max_size=3) | VALUES, max_size=3))
@example(tree={"train": {"batch_size": {}}})
def test_configs(tree: dict, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    path.write_text(yaml.safe_dump(tree, allow_unicode=True), encoding="utf-8")
    refused(lambda: parse(TrainConfig, ["--config", str(path)], "speechrl train"))


@FUZZ
@given(
    text=st.text(max_size=60) | st.sampled_from(["{", "a: [", "- 1\n- 2", "a: 1\na: 2", "&a [*a]", "? [1]\n: 2", "!!x"])
)
def test_config_files_that_are_no_yaml(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "text.yaml"
    path.write_text(text, encoding="utf-8")
    refused(lambda: parse(TrainConfig, ["--config", str(path)], "speechrl train"))


@FUZZ
@given(argv=st.lists(st.sampled_from(ARGUMENTS) | st.text(max_size=9), max_size=6))
def test_command_lines(argv: list[str]) -> None:
    if {"-h", "--help"} & set(argv):
        return
    refused(lambda: parse(TrainConfig, argv, "speechrl train"))


def refused(call: Callable[[], object]) -> None:
    """Nothing here names a model and a manifest, so that all of it must be refused, as a user's mistake."""
    with pytest.raises(SystemExit) as caught:
        call()
    assert caught.value.code == 2


@FUZZ
@given(answer=VALUES | st.fixed_dictionaries({"rewards": st.lists(SCALARS, max_size=3)}, optional={
    "parts": VALUES, "scores": VALUES, "weights": VALUES, "extra_logs": VALUES, "log_counts": VALUES
}))  # fmt: skip
@example(answer={"rewards": [1, 2], "extra_logs": {"a": [1.0, 2.0]}, "log_counts": {"a": "x"}})
@example(answer={"rewards": [1, 10**400]})
def test_reward_answers(answer: Any) -> None:
    try:
        checked = check_answer(answer, ["u1", "u2"], "r.py")
    except RewardError as error:
        assert "r.py" in str(error)
        return
    for values in (checked.rewards, *checked.parts.values()):
        assert len(values) == 2 and all(value is None or math.isfinite(value) for value in values)
    assert all(math.isfinite(value) for value in checked.extra_logs.values())


@FUZZ
@given(manifest=VALUES | st.fixed_dictionaries({"files": st.dictionaries(st.text(max_size=5), VALUES, max_size=2)}))
def test_manifests_of_checkpoints(manifest: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder: Path = tmp_path_factory.getbasetemp() / "checkpoint"
    folder.mkdir(exist_ok=True)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    whole = manifest == {"files": {}}
    assert (fault_of(folder) == "") == whole
