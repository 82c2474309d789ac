"""The client against real servers on loopback ports."""

import contextlib
import socket
import threading
import time

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import Response

from speechrl.reward.client import RewardClient, merge_answers, split_groups
from speechrl.reward.plugin import RewardAnswer, RewardError
from speechrl.reward.server import make_app
from speechrl.types import Group, Prompt, Rollout, Scores, Utterance

LENGTHS = (
    "def reward_func(queries, prompts, labels, responses, **kwargs):\n"
    "    n = [len(r) for r in responses]\n"
    "    parts = {'half': [x / 2 for x in n]}\n"
    "    return {'rewards': n, 'parts': parts, 'weights': {'half': 2}, 'extra_logs': {'mean': n}, 'scores': n}\n"
)


@contextlib.contextmanager
def running(app: FastAPI):
    """Serves `app` in a thread; gives its base address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        deadline = time.monotonic() + 20
        while not server.started and time.monotonic() < deadline:
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(20)


class Scripted:
    """A server that answers from a list of (status, body), the last one for ever, and keeps the requests."""

    def __init__(self, *answers: tuple[int, str]):
        self.answers = list(answers)
        self.bodies: list[dict] = []
        self.app = FastAPI()
        self.app.post("/get_reward")(self.get_reward)

    async def get_reward(self, request: Request) -> Response:
        self.bodies.append(await request.json())
        status, body = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return Response(body, status_code=status, media_type="application/json")


def make_groups(*sizes: int) -> list[Group]:
    """Groups utt-0, utt-1, ... of these sizes; the g-th response is g + 1 letters long."""
    groups = []
    for index, size in enumerate(sizes):
        utterance = Utterance(f"utt-{index}", "ref", metadata={"index": index})
        rollouts = tuple(Rollout((1,), (-0.5,), "stop", 0, f"<t>{'x' * g}", "x" * g) for g in range(1, size + 1))
        groups.append(Group(Prompt(utterance, (7,), "p:"), rollouts))
    return groups


def client_of(*bases: str, **options) -> RewardClient:
    return RewardClient([f"{base}/get_reward" for base in bases], **{"backoff_s": 0.01, **options})


def write(folder, code: str):
    path = folder / "served.py"
    path.write_text(code)
    return path


def test_file_and_server_agree(tmp_path):
    path = write(tmp_path, LENGTHS)
    groups = make_groups(2, 3, 1)
    expected = [
        Scores((1.0, 2.0), {"half": (0.5, 1.0)}, {"half": 2.0}, (1.0, 2.0)),
        Scores((1.0, 2.0, 3.0), {"half": (0.5, 1.0, 1.5)}, {"half": 2.0}, (1.0, 2.0, 3.0)),
        Scores((1.0,), {"half": (0.5,)}, {"half": 2.0}, (1.0,)),
    ]
    logs = {"mean": pytest.approx(10 / 6)}
    local = RewardClient([str(path)])
    local.probe()
    assert local.score(groups) == expected
    assert local.answer(groups).extra_logs == logs
    with running(make_app(path)) as base:
        for batch_size in (64, 4, 1):
            client = client_of(base, batch_size=batch_size)
            client.probe()
            assert client.score(groups) == expected
            assert client.answer(groups).extra_logs == logs
            assert client.answer(groups).scores == [1.0, 2.0, 1.0, 2.0, 3.0, 1.0]
            assert client.score([]) == []
            client.close()


def test_server_takes_openrlhf_calls_and_names_bad_keys(tmp_path):
    with running(make_app(write(tmp_path, LENGTHS))) as base:
        call = {"query": ["p:abc", "p:"], "prompts": ["p:", "p:"], "labels": ["", ""]}
        answer = httpx.post(f"{base}/get_reward", json=call)
        assert (answer.status_code, answer.json()["rewards"]) == (200, [3.0, 0.0])
        missing = httpx.post(f"{base}/get_reward", json={"query": [], "labels": []})
        assert missing.status_code == 422
        assert missing.json() == {"error": "prompts: Field required", "retry": False}
        unequal = httpx.post(f"{base}/get_reward", json={**call, "labels": [""]})
        assert unequal.status_code == 422
        assert "labels has length 1, but query has 2" in unequal.json()["error"]
        assert httpx.get(f"{base}/health").json()["status"] == "ok"
        schema = httpx.get(f"{base}/schema").json()
        assert schema["request"]["required"] == ["query", "prompts", "labels"]
        assert list(schema["answer"]["properties"]) == ["rewards", "scores", "extra_logs", "parts", "weights"]


def test_finish_reasons_and_tags_arrive_at_a_served_file(tmp_path):
    code = (
        "def reward_func(queries, prompts, labels, finish_reasons, raw_responses):\n"
        "    return [len(raw) + 10 * (why == 'length') + 20 * (why is None)\n"
        "            for raw, why in zip(raw_responses, finish_reasons)]\n"
    )
    utterance = Utterance("utt-0", "ref")
    rollouts = (Rollout((1,), (-0.5,), "stop", 0, "<t>x", "x"), Rollout((1,), (-0.5,), "length", 0, "<t>xx", "xx"))
    with running(make_app(write(tmp_path, code))) as base:
        assert client_of(base).score([Group(Prompt(utterance, (7,), "p:"), rollouts)]) == [Scores((4.0, 15.0))]
        call = {"query": ["p:<t>xyz"], "prompts": ["p:"], "labels": [""]}  # OpenRLHF says neither
        assert httpx.post(f"{base}/get_reward", json=call).json()["rewards"] == [26.0]
        wrong = httpx.post(f"{base}/get_reward", json={**call, "finish_reasons": ["eos"]})
        assert (wrong.status_code, "finish_reasons" in wrong.json()["error"]) == (422, True)


def test_error_of_a_served_plugin_is_not_tried_again(tmp_path):
    path = write(
        tmp_path, "calls = []\ndef reward_func(q, p, l):\n    calls.append(1)\n    return 1 / (1 - len(calls))\n"
    )
    with running(make_app(path)) as base, pytest.raises(RewardError) as caught:
        client_of(base).score(make_groups(2))  # a second call would divide by -1
    assert "served.py:4: reward_func raised ZeroDivisionError" in str(caught.value)
    assert "answered 500" in str(caught.value)
    assert "samples utt-0" in str(caught.value)


def test_503_twice_then_success():
    server = Scripted((503, "busy"), (503, "busy"), (200, '{"rewards": [0.5, null]}'))
    with running(server.app) as base:
        assert client_of(base).score(make_groups(2)) == [Scores((0.5, None))]
    assert len(server.bodies) == 3
    assert server.bodies[2] == {
        "query": ["p:<t>x", "p:<t>xx"],
        "prompts": ["p:", "p:"],
        "labels": ["ref", "ref"],
        "ids": ["utt-0", "utt-0"],
        "responses": ["x", "xx"],
        "metadata": [{"index": 0}, {"index": 0}],
        "languages": [None, None],
        "keywords": [[], []],
        "audio_paths": [None, None],
        "durations_s": [None, None],
        "finish_reasons": ["stop", "stop"],
        "raw_responses": ["<t>x", "<t>xx"],
    }


@pytest.mark.parametrize(
    ("status", "body", "calls", "message"),
    [
        (400, "no such task " + "y" * 400, 1, "answered 400: no such task " + "y" * 287 + " (samples utt-0)"),
        (500, "boom", 3, "no reward after 3 tries; the last: POST"),
        (429, "slow down", 3, "answered 429: slow down (samples utt-0)"),
        (500, '{"error": "bad", "retry": false}', 1, "answered 500"),
        (200, "<html>", 1, "the answer is not JSON"),
        (200, '{"rewards": [NaN, 1.0]}', 1, "NaN is not a JSON number"),
        (200, '{"rewards": [1e999, 1.0]}', 1, "rewards[0], of sample utt-0, is inf"),
        (200, '{"rewards": [1.0]}', 1, "rewards has length 1 for 2 completions (samples utt-0)"),
        (200, '{"rewards": ["1.0", 1.0]}', 1, "not str"),
        (200, '{"error": "x"}', 1, "no 'rewards'"),
    ],
)
def test_failures_are_errors_and_never_numbers(status, body, calls, message):
    server = Scripted((status, body))
    with running(server.app) as base, pytest.raises(RewardError) as caught:
        client_of(base, max_retries=2).score(make_groups(2))
    assert message in str(caught.value)
    assert f"{base}/get_reward" in str(caught.value)
    assert len(server.bodies) == calls


def test_requests_spread_over_replicas_in_order():
    first, second = Scripted((200, '{"rewards": [1.0, 1.0]}')), Scripted((200, '{"rewards": [2.0, 2.0]}'))
    with running(first.app) as one, running(second.app) as two:
        scores = client_of(one, two, batch_size=2).score(make_groups(2, 2, 2, 2))
    assert [score.rewards for score in scores] == [(1.0, 1.0), (2.0, 2.0), (1.0, 1.0), (2.0, 2.0)]
    assert (len(first.bodies), len(second.bodies)) == (2, 2)


def closed_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_a_dead_replica_is_passed_over():
    alive = Scripted((200, '{"rewards": [2.0]}'))
    with running(alive.app) as base:
        assert client_of(closed_port(), base).score(make_groups(1)) == [Scores((2.0,))]


def test_timeout_names_its_flag():
    app = FastAPI()

    @app.post("/get_reward")
    def slow() -> None:
        time.sleep(0.3)

    with running(app) as base, pytest.raises(RewardError, match=r"ReadTimeout.*--reward\.timeout_s is 0\.05"):
        client_of(base, timeout_s=0.05, max_retries=0).score(make_groups(1))


def test_probe():
    dead = closed_port()
    with pytest.raises(RewardError, match=rf"--reward\.remote_url: no reward server at {dead}/get_reward"):
        client_of(dead).probe()
    with running(Scripted((200, "{}")).app) as base:  # somebody else's server, without /health
        client_of(base).probe()
    app = FastAPI()

    @app.get("/health")
    def sick() -> Response:
        return Response("loading", status_code=503)

    with running(app) as base, pytest.raises(RewardError, match="answered 503: loading"):
        client_of(base).probe()


def test_close_ends_waiting_retries():
    server = Scripted((503, "busy"))
    with running(server.app) as base:
        client = client_of(base, backoff_s=30.0)
        threading.Timer(0.3, client.close).start()
        start = time.monotonic()
        with pytest.raises(RewardError, match="closed while retrying"):
            client.score(make_groups(1))
        assert time.monotonic() - start < 10


@pytest.mark.parametrize("urls", [[], ["reward.txt"], ["a.py", "b.py"], ["a.py", "http://h/x"], ["http://h:x/y"]])
def test_unusable_urls(urls):
    with pytest.raises(ValueError, match=r"--reward\.remote_url is .*give one \.py or \.yaml file"):
        RewardClient(urls)


def test_metadata_that_is_not_json():
    utterance = Utterance("utt-nan", "ref", metadata={"snr": float("nan")})
    group = Group(Prompt(utterance, (7,), "p:"), (Rollout((1,), (-0.5,), "stop", 0, "x", "x"),))
    with pytest.raises(RewardError, match=r"can't be sent as JSON.*utt-nan"):
        client_of("http://127.0.0.1:9").score([group])


def test_groups_are_never_cut():
    sizes = [[len(group.rollouts) for group in batch] for batch in split_groups(make_groups(4, 4, 4, 9, 1, 8), 8)]
    assert sizes == [[4, 4], [4], [9], [1], [8]]


def test_merge_refuses_different_parts():
    with pytest.raises(RewardError, match="different parts"):
        merge_answers([RewardAnswer([1.0], {"cer": [1.0]}), RewardAnswer([1.0])])
    answers = [RewardAnswer([1.0], {"cer": [1.0]}, weights={"cer": weight}) for weight in (1.0, 2.0)]
    with pytest.raises(RewardError, match="different weights"):
        merge_answers(answers)
