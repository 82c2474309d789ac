"""Starting Ray, and who lives where."""

from __future__ import annotations

import pytest
import ray

from speechrl import launch
from speechrl.launch import ENGINE_GPU_SHARE, REFERENCE_GPU_SHARE, _bundle, _reserve, _start_private, _vllm_server
from speechrl.sections import Vllm

from .stand_ins import Lodger


def starts(monkeypatch: pytest.MonkeyPatch, *faults: str) -> list[dict]:
    """ray.init fails once for each fault, then works; what it was called with is noted."""
    calls: list[dict] = []

    def init(**options: object) -> None:
        calls.append(options)
        if len(calls) <= len(faults):
            raise Exception(faults[len(calls) - 1])

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: calls.append({"shutdown": True}))
    return calls


SLOW = "The current node timed out during startup. This could happen because ..."


def test_a_busy_machine_is_given_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = starts(monkeypatch, SLOW)
    _start_private({"num_cpus": 2}, 60.0)
    assert calls == [{"address": "local", "num_cpus": 2}, {"shutdown": True}, {"address": "local", "num_cpus": 2}]


def test_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    starts(monkeypatch, *[SLOW] * 3)
    with pytest.raises(TimeoutError, match=r"--ray\.startup_timeout_s 0"):
        _start_private({}, 0.0)


def test_other_faults_are_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = starts(monkeypatch, "no room on the device")
    with pytest.raises(Exception, match="no room"):
        _start_private({}, 60.0)
    assert len(calls) == 1


@pytest.mark.e2e
def test_engine_i_gets_the_gpu_of_bundle_i(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what shares it, by Ray's word, which needs no GPU: a handle of a GPU's memory opens on that GPU alone."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(launch, "VllmServer", Lodger)
    rank_share = 1 - REFERENCE_GPU_SHARE - ENGINE_GPU_SHARE
    _start_private({"num_cpus": 4, "num_gpus": 2, "include_dashboard": False}, 200.0)
    try:
        placement = _reserve(2, 1, 60.0)
        lodger = ray.remote(Lodger)
        ranks, references = (
            [lodger.options(num_cpus=0, num_gpus=share, **_bundle(placement, number)).remote() for number in range(2)]
            for share in (rank_share, REFERENCE_GPU_SHARE)
        )
        engines = [
            _vllm_server({}, Vllm(), 0, ENGINE_GPU_SHARE, placement, number)  # type: ignore[arg-type]
            for number in range(2)
        ]
        gpus = [ray.get([home.gpus.remote() for home in row], timeout=60) for row in (ranks, references, engines)]
        assert gpus[0] == gpus[1] == gpus[2]
        assert sorted(gpus[0]) == [[0], [1]]
    finally:
        ray.shutdown()
