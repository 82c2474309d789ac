"""`speechrl serve-reward`: its workers, queue, limits and metrics, over real sockets and processes."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
import requests
import torch

from speechrl.config import ServeRewardConfig
from speechrl.reward.client import RewardClient
from speechrl.reward.plugin import RewardAnswer, RewardError, RewardRequest
from speechrl.reward.server import RewardCall, RewardReply, make_app, reply
from speechrl.reward.workers import Workers
from speechrl.sections import Reward
from speechrl.types import Group, Prompt, Rollout, Scores, Utterance

from .reward_servers import client_of, make_groups, running, serving

CALL = {"query": ["p:abc", "p:"], "prompts": ["p:", "p:"], "labels": ["", ""]}
LENGTHS = (
    "def reward_func(queries, prompts, labels, responses, **kwargs):\n"
    "    n = [len(r) for r in responses]\n"
    "    parts = {'half': [x / 2 for x in n]}\n"
    "    return {'rewards': n, 'parts': parts, 'weights': {'half': 2}, 'extra_logs': {'mean': n}, 'scores': n}\n"
)
PID = "import os\ndef reward_func(queries, prompts, labels):\n    return [os.getpid()] * len(queries)\n"


def write(folder: Path, code: str) -> Path:
    path = folder / "served.py"
    path.write_text(f"HERE = {str(folder)!r}\n" + code)
    return path


def metric(base: str, name: str) -> float:
    """One value of /metrics; 0 before its first sample."""
    lines = httpx.get(f"{base}/metrics").text.splitlines()
    values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.rsplit(" ", 1)[0] == f"speechrl_reward_{name}"]
    return values[0] if values else 0.0


def until(condition) -> None:
    """Waits until it is true; fails after 20 s."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)


@contextlib.contextmanager
def calling(call):
    """Runs it in a thread; the list gets its result at the end of the block."""
    results: list = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    try:
        yield results
    finally:
        thread.join(20)


# --- the wire -------------------------------------------------------------------------------------------------------


def test_file_and_server_agree(tmp_path):
    path = write(tmp_path, LENGTHS)
    groups = make_groups(2, 3, 1)
    expected = [
        Scores((1.0, 2.0), {"half": (0.5, 1.0)}, {"half": 2.0}, (1.0, 2.0)),
        Scores((1.0, 2.0, 3.0), {"half": (0.5, 1.0, 1.5)}, {"half": 2.0}, (1.0, 2.0, 3.0)),
        Scores((1.0,), {"half": (0.5,)}, {"half": 2.0}, (1.0,)),
    ]
    logs = {"mean": pytest.approx(10 / 6)}
    local = RewardClient.from_options(Reward(remote_url=(str(path),)))
    local.probe()
    assert local.score(groups) == local.trial(groups) == expected
    assert local.answer(groups).extra_logs == logs
    with serving(path) as base:
        for batch_size in (64, 4, 1):
            client = client_of(base, batch_size=batch_size)
            client.probe()
            assert client.score(groups) == expected
            assert client.answer(groups).extra_logs == logs
            assert client.answer(groups).scores == [1.0, 2.0, 1.0, 2.0, 3.0, 1.0]
            assert client.score([]) == []
            client.close()


def openrlhf_get_rewards(url: str) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """What OpenRLHF 0.11 sends to a server, and does with the answers of two chunks."""
    infos = []
    for index in range(2):
        data = {name: values[index : index + 1] for name, values in CALL.items()}
        response = requests.post(url=url, json=data, headers={"Content-Type": "application/json"}, timeout=180)
        response.raise_for_status()
        infos.append(response.json())
    rewards = torch.cat([torch.as_tensor(info["rewards"]) for info in infos], dim=0)
    scores = torch.cat([torch.as_tensor(info["scores"]) for info in infos], dim=0) if "scores" in infos[0] else rewards
    logs = {
        key: torch.cat([torch.as_tensor(info["extra_logs"][key]) for info in infos], dim=0)
        for key in infos[0].get("extra_logs", {})
    }
    return rewards, scores, logs


def test_openrlhf_client(tmp_path):
    with serving(write(tmp_path, LENGTHS)) as base:
        rewards, scores, logs = openrlhf_get_rewards(f"{base}/get_reward")
    assert (rewards.tolist(), scores.tolist(), logs["mean"].tolist()) == ([3.0, 0.0], [3.0, 0.0], [3.0, 0.0])
    with serving(write(tmp_path, "def reward_func(queries, prompts, labels):\n    return [0.5]\n")) as base:
        rewards, scores, logs = openrlhf_get_rewards(f"{base}/get_reward")
    assert (rewards.tolist(), scores.tolist(), logs) == ([0.5, 0.5], [0.5, 0.5], {})


def test_every_field_of_a_request_is_a_key_of_the_call():
    """`queries` is OpenRLHF's `query`; what a caller leaves out has a default."""
    fields = [field.name for field in dataclasses.fields(RewardRequest)]
    assert {"queries" if name == "query" else name for name in RewardCall.model_fields} == set(fields)
    lists = vars(RewardCall(query=["p:x"], prompts=["p:"], labels=["r"]).to_request())
    assert list(lists) == fields and lists["responses"] == lists["raw_responses"] == ["x"]


def test_every_field_of_an_answer_is_in_the_reply_and_in_the_schema():
    fields = {field.name for field in dataclasses.fields(RewardAnswer)}
    assert set(RewardReply.model_fields) == fields
    full = reply(RewardAnswer([1.0, None], {"a": [None, 2.0]}, {"n": 3.0}, [0.0, 1.0], {"a": 2.0}, {"n": 1}))
    assert set(full) == fields
    assert json.loads(RewardReply(**full).model_dump_json()) == full
    assert full["extra_logs"] == {"n": [3.0, 3.0]}
    assert reply(RewardAnswer([1.0])) == {
        "rewards": [1.0],
        "parts": {},
        "extra_logs": {},
        "weights": {},
        "log_counts": {},
        "heard": [],
    }


def test_bad_keys_are_named_and_the_schema_told(tmp_path):
    with serving(write(tmp_path, LENGTHS)) as base:
        url = f"{base}/get_reward"
        assert httpx.post(url, json={"query": [], "prompts": [], "labels": []}).json() == {"rewards": []}
        missing = httpx.post(url, json={"query": [], "labels": []})
        assert (missing.status_code, missing.json()) == (422, {"error": "prompts: Field required", "retry": False})
        unequal = httpx.post(url, json={**CALL, "labels": [""]})
        assert unequal.status_code == 422
        assert "labels has length 1, but query has 2" in unequal.json()["error"]
        wrong = httpx.post(url, json={**CALL, "query": ["a", 3]})
        assert "query: 1: Input should be a valid string" in wrong.json()["error"]
        assert "Invalid JSON" in httpx.post(url, content=b"{").json()["error"]
        assert httpx.get(f"{base}/health").json()["status"] == "ok"
        schema = httpx.get(f"{base}/schema").json()
        assert schema["request"]["required"] == ["query", "prompts", "labels"]
        assert list(schema["answer"]["properties"]) == [
            "rewards",
            "scores",
            "extra_logs",
            "parts",
            "weights",
            "log_counts",
            "heard",
        ]
        assert metric(base, 'requests_total{status="422"}') == 4
        assert metric(base, "completions_total") == 0


def test_finish_reasons_and_tags_arrive_at_a_served_file(tmp_path):
    code = (
        "def reward_func(queries, prompts, labels, finish_reasons, raw_responses):\n"
        "    return [len(raw) + 10 * (why == 'length') + 20 * (why is None)\n"
        "            for raw, why in zip(raw_responses, finish_reasons)]\n"
    )
    rollouts = (Rollout((1,), (-0.5,), "stop", 0, "<t>x", "x"), Rollout((1,), (-0.5,), "length", 0, "<t>xx", "xx"))
    group = Group(Prompt(Utterance("utt-0", "ref"), (7,), "p:"), rollouts)
    with serving(write(tmp_path, code)) as base:
        assert client_of(base).score([group]) == [Scores((4.0, 15.0))]
        call = {"query": ["p:<t>xyz"], "prompts": ["p:"], "labels": [""]}  # OpenRLHF says neither
        assert httpx.post(f"{base}/get_reward", json=call).json()["rewards"] == [26.0]
        wrong = httpx.post(f"{base}/get_reward", json={**call, "finish_reasons": ["eos"]})
        assert (wrong.status_code, "finish_reasons" in wrong.json()["error"]) == (422, True)


def test_an_error_of_the_file_is_not_tried_again(tmp_path):
    code = "calls = []\ndef reward_func(q, p, l):\n    calls.append(1)\n    return 1 / (1 - len(calls))\n"
    with serving(write(tmp_path, code)) as base:
        with pytest.raises(RewardError) as caught:
            client_of(base).score(make_groups(2))  # a second call would divide by -1
        assert metric(base, "failures_total") == metric(base, 'requests_total{status="500"}') == 1
    assert "served.py:5: reward_func raised ZeroDivisionError" in str(caught.value)
    assert "answered 500" in str(caught.value)
    assert "samples utt-0" in str(caught.value)


# --- the queue ------------------------------------------------------------------------------------------------------

# Writes "call 1", "call 2", ... beside the file, and returns when there is a file "go".
GATED = (
    "import os, time\n"
    "calls = []\n"
    "def reward_func(queries, prompts, labels):\n"
    "    calls.append(1)\n"
    "    open(f'{HERE}/call {len(calls)}', 'w').close()\n"
    "    while not os.path.exists(f'{HERE}/go'):\n"
    "        time.sleep(0.02)\n"
    "    return [len(calls)] * len(queries)\n"
)


def test_what_does_not_fit_into_the_queue_is_refused_and_comes_back(tmp_path):
    with serving(write(tmp_path, GATED), max_queue=1) as base:
        url = f"{base}/get_reward"
        with (
            calling(lambda: httpx.post(url, json=CALL, timeout=20).json()["rewards"]) as first,
            contextlib.ExitStack() as later,
        ):
            until((tmp_path / "call 1").exists)
            second = later.enter_context(calling(lambda: httpx.post(url, json=CALL, timeout=20).json()["rewards"]))
            until(lambda: metric(base, "queue_length") == 1)
            refused = httpx.post(url, json=CALL)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert refused.json() == {
                "error": "1 requests wait already (--max_queue of the reward server)",
                "retry": True,
            }
            third = later.enter_context(calling(lambda: client_of(base).score(make_groups(1))))
            until(lambda: metric(base, 'requests_total{status="429"}') == 2)
            (tmp_path / "go").touch()
        assert (first, second, third) == ([[1.0, 1.0]], [[2.0, 2.0]], [[Scores((3.0,))]])
        assert metric(base, "queue_length") == 0
        assert metric(base, "completions_total") == 5
        assert metric(base, "seconds_count") == 3


def test_who_has_gone_is_not_scored(tmp_path):
    with serving(write(tmp_path, GATED)) as base:
        url = f"{base}/get_reward"
        with calling(lambda: httpx.post(url, json=CALL, timeout=20).json()["rewards"]) as first:
            until((tmp_path / "call 1").exists)
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(url, json=CALL, timeout=0.2)
            (tmp_path / "go").touch()
        assert httpx.post(url, json=CALL, timeout=20).json()["rewards"] == [2.0, 2.0]
        assert first == [[1.0, 1.0]]


# --- token and size -------------------------------------------------------------------------------------------------


def test_token(tmp_path, monkeypatch):
    monkeypatch.setenv("RIGHT", "s3cret")
    monkeypatch.setenv("WRONG", "s3cre")
    with serving(write(tmp_path, LENGTHS), token="s3cret") as base:
        assert httpx.get(f"{base}/health").status_code == 200
        for path in ("schema", "metrics"):
            assert httpx.get(f"{base}/{path}").status_code == 401
            assert httpx.get(f"{base}/{path}", headers={"authorization": "Bearer s3cret"}).status_code == 200
        for variable in ("", "WRONG"):
            with pytest.raises(RewardError, match=r"answered 401: .*set --reward\.token_env"):
                client_of(base, token_env=variable).score(make_groups(1))
        assert client_of(base, token_env="RIGHT").score(make_groups(1)) == [
            Scores((1.0,), {"half": (0.5,)}, {"half": 2.0}, (1.0,))
        ]
        seen = httpx.get(f"{base}/metrics", headers={"authorization": "Bearer s3cret"}).text
        assert 'requests_total{status="401"} 2.0' in seen  # no retries


def test_size(tmp_path):
    with serving(write(tmp_path, LENGTHS), max_request_mb=0.01) as base:
        assert len(client_of(base).score(make_groups(2))) == 1
        with pytest.raises(RewardError) as caught:
            client_of(base).score(make_groups(200))
        assert "answered 413" in str(caught.value)
        assert "longer than --max_request_mb 0.01" in str(caught.value)
        assert "smaller --reward.batch_size" in str(caught.value)
        # more than socket buffers hold, from a client that does not look for an answer while it sends
        huge = requests.post(f"{base}/get_reward", data=b"x" * 30_000_000, timeout=20)
        assert (huge.status_code, huge.json()["retry"]) == (413, False)
        assert metric(base, 'requests_total{status="413"}') == 2


# --- workers ----------------------------------------------------------------------------------------------------------


def test_two_workers_score_at_the_same_time(tmp_path):
    code = (
        "import os, time\n"
        "def reward_func(queries, prompts, labels):\n"
        "    open(f'{HERE}/{os.getpid()}.pid', 'w').close()\n"
        "    deadline = time.monotonic() + 15\n"
        "    while sum(name.endswith('.pid') for name in os.listdir(HERE)) < 2:\n"
        "        assert time.monotonic() < deadline, 'nobody came'\n"
        "        time.sleep(0.02)\n"
        "    return [os.getpid()] * len(queries)\n"
    )
    with serving(write(tmp_path, code), workers=2) as base:
        scores = client_of(base, batch_size=1).score(make_groups(1, 1))
        assert httpx.get(f"{base}/health").json()["workers"] == 2
    pids = {score.rewards[0] for score in scores}
    assert len(pids) == 2
    assert os.getpid() not in pids


def test_a_worker_killed_between_requests_is_replaced(tmp_path):
    with serving(write(tmp_path, PID)) as base:
        client = client_of(base, max_retries=0)
        first = int(client.score(make_groups(1))[0].rewards[0])
        os.kill(first, signal.SIGKILL)
        os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
        assert client.score(make_groups(1))[0].rewards[0] != first
        assert (metric(base, "worker_restarts"), metric(base, "failures_total")) == (1, 0)


KILLS_ITSELF = (
    "import os, signal\n"
    "def reward_func(queries, prompts, labels):\n"
    "    if not os.path.exists(f'{HERE}/spare'):\n"
    "        open(f'{HERE}/once', 'w').close()\n"
    "        os.kill(os.getpid(), signal.SIGKILL)\n"
    "    return [1.0] * len(queries)\n"
)


def test_a_worker_killed_while_it_scores_costs_a_try(tmp_path):
    code = KILLS_ITSELF.replace("spare", "once")
    with serving(write(tmp_path, code)) as base:
        assert client_of(base).score(make_groups(1)) == [Scores((1.0,))]
        assert (metric(base, "worker_restarts"), metric(base, "failures_total")) == (1, 1)


def test_a_sample_that_kills_each_worker_is_named(tmp_path):
    with serving(write(tmp_path, KILLS_ITSELF)) as base:
        with pytest.raises(RewardError) as caught:
            client_of(base, max_retries=1).score(make_groups(1))
        (tmp_path / "spare").touch()
        assert client_of(base, max_retries=0).score(make_groups(1)) == [Scores((1.0,))]
    assert "no reward after 2 tries; the last: POST" in str(caught.value)
    assert "a worker ended with exit code -9 while scoring samples utt-0" in str(caught.value)


def test_a_file_that_a_new_worker_can_not_load_ends_the_server(tmp_path):
    path = write(tmp_path, KILLS_ITSELF)
    workers = Workers(str(path), 1)
    failures = []
    workers.on_failure = lambda: failures.append(workers.failure)
    path.write_text("import no_such_module_x\n")
    try:
        app = make_app(workers, ServeRewardConfig(file=str(path)))
        with running(app) as base, pytest.raises(RewardError, match="ModuleNotFoundError while loading"):
            client_of(base, max_retries=1).score(make_groups(1))
    finally:
        workers.close()
    assert len(failures) == 1
    assert f"{path}:1: ModuleNotFoundError while loading: No module named 'no_such_module_x'" in failures[0]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import no_such_module_x\n", "served.py:2: ModuleNotFoundError while loading"),
        ("import os\nos._exit(7)\n", "a worker ended with exit code 7 while it loaded the reward file"),
    ],
)
def test_workers_that_can_not_load(tmp_path, code, message):
    with pytest.raises(ValueError, match=message):
        Workers(str(write(tmp_path, code)), 2)


# --- the command ------------------------------------------------------------------------------------------------------


def start(*argv: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "speechrl.cli", "serve-reward", *argv]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def runs(pid: int) -> bool:
    """False for a zombie too: an orphan may wait for a process 1 that never asks for it."""
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "\nState:\tZ" not in status.read_text()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 0), (signal.SIGKILL, -9)])
def test_the_command_serves_and_ends_with_its_workers(tmp_path, number, code):
    process = start(str(write(tmp_path, PID)), "--port", "0", "--workers", "1")
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        base = line.split(" at ")[1].split("/get_reward")[0]
        worker = int(client_of(base, max_retries=0).score(make_groups(1))[0].rewards[0])
        assert runs(worker) and worker != process.pid
        process.send_signal(number)
        assert process.wait(20) == code
        if code == 0:
            assert not runs(worker)
        until(lambda: not runs(worker))
    finally:
        process.kill()
        process.communicate()


def test_the_command_says_why_it_can_not_serve(tmp_path):
    process = start(str(write(tmp_path, "1 / 0\n")), "--port", "0")
    out, err = process.communicate(timeout=30)
    assert process.returncode == 2
    assert "speechrl serve-reward: FILE: " in err
    assert "served.py:2: ZeroDivisionError while loading" in err
    assert out == ""
