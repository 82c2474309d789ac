"""Starting Ray."""

from __future__ import annotations

import pytest
import ray

from speechrl.launch import _start_private


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
