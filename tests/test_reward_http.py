"""The reward client against real servers on loopback ports; tests/test_reward_server.py has our own server."""

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from speechrl.cross_checks import reward_parts
from speechrl.reward.client import RewardClient, merge_answers, split_groups
from speechrl.reward.plugin import RewardAnswer, RewardError, check_answer
from speechrl.reward.server import reply
from speechrl.reward.transport import rest_s
from speechrl.sections import Reward
from speechrl.types import Group, Prompt, Rollout, Scores, Utterance

from .reward_servers import client_of, make_groups, running


class Scripted:
    """A server that answers from a list of (status, body), the last one for ever, and keeps the requests."""

    def __init__(self, *answers: tuple[int, str], headers: dict[str, str] | None = None):
        self.answers = list(answers)
        self.headers = headers
        self.bodies: list[dict] = []
        self.tokens: list[str | None] = []
        self.app = FastAPI()
        self.app.post("/get_reward")(self.get_reward)

    async def get_reward(self, request: Request) -> Response:
        self.bodies.append(await request.json())
        self.tokens.append(request.headers.get("authorization"))
        status, body = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return Response(body, status_code=status, media_type="application/json", headers=self.headers)


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


def test_a_server_that_answers_byte_by_byte_is_too_slow():
    """Each read is quick, so that a timeout of reads alone would wait for ever."""
    app = FastAPI()

    @app.post("/get_reward")
    async def get_reward() -> StreamingResponse:
        async def drops() -> AsyncIterator[bytes]:
            for _ in range(30):
                yield b" "
                await asyncio.sleep(0.1)

        return StreamingResponse(drops())

    with running(app) as base:
        client, started = client_of(base, timeout_s=0.5, max_retries=0), time.monotonic()
        with pytest.raises(RewardError, match=r"ReadTimeout: .*\(--reward.timeout_s is 0.5\)"):
            client.score(make_groups(2))
        assert time.monotonic() - started < 2


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
        (200, '{"rewards": [1, 2], "parts": {"a\\ud800": [1, 2]}}', 1, "holds '\\ud800', half of a surrogate pair"),
        (200, '{"rewards": [1, 2], "heard": ["x", "\\uDFFF"]}', 1, "holds '\\udfff', half of a surrogate pair"),
        (200, "[" * 100_000, 1, "the answer is not JSON (maximum recursion"),
        (500, "[" * 100_000, 3, "no reward after 3 tries"),
        (200, '{"rewards": [1, 2], "parts": {"": [1, 2]}}', 1, "parts has an empty name"),
        (200, '{"rewards": [1, 2], "extra_logs": {"a": 1}, "log_counts": {"a": 0}}', 1, "log_counts['a'] is 0; it is"),
        (200, '{"rewards": [1, 2], "extra_logs": {"a": 1}, "log_counts": {"a": null}}', 1, "log_counts['a'] is None"),
        (200, '{"rewards": [1, 2], "extra_logs": {"a": 1}, "log_counts": {"a": "x"}}', 1, "log_counts['a'] is 'x'"),
        (200, '{"rewards": [1, 2], "log_counts": [1]}', 1, "log_counts[''] is [1]"),
    ],
)
def test_failures_are_errors_and_never_numbers(status, body, calls, message):
    server = Scripted((status, body))
    with running(server.app) as base, pytest.raises(RewardError) as caught:
        client_of(base, max_retries=2).score(make_groups(2))
    assert message in str(caught.value)
    assert f"{base}/get_reward" in str(caught.value)
    assert len(server.bodies) == calls


def test_an_answer_that_is_not_encoded_as_it_says_is_asked_for_again():
    server = Scripted((200, "abc"), headers={"content-encoding": "gzip"})
    with running(server.app) as base, pytest.raises(RewardError, match=r"no reward after 2 tries.*DecodingError"):
        client_of(base, max_retries=1).score(make_groups(2))
    assert len(server.bodies) == 2


def test_a_redirect_names_where_to():
    server = Scripted((307, ""), headers={"location": "https://elsewhere/get_reward"})
    with (
        running(server.app) as base,
        pytest.raises(RewardError, match=r"307.*the address that it names, https://elsew"),
    ):
        client_of(base).score(make_groups(2))


def test_requests_spread_over_replicas_in_order():
    first, second = Scripted((200, '{"rewards": [1.0, 1.0]}')), Scripted((200, '{"rewards": [2.0, 2.0]}'))
    with running(first.app) as one, running(second.app) as two:
        scores = client_of(one, two, batch_size=2).score(make_groups(2, 2, 2, 2))
    assert [score.rewards for score in scores] == [(1.0, 1.0), (2.0, 2.0), (1.0, 1.0), (2.0, 2.0)]
    assert (len(first.bodies), len(second.bodies)) == (2, 2)


def test_calls_of_one_request_spread_over_replicas():
    """Groups are scored as an engine finishes them, often no more at a time than one request holds."""
    first, second = Scripted((200, '{"rewards": [1.0]}')), Scripted((200, '{"rewards": [2.0]}'))
    with running(first.app) as one, running(second.app) as two:
        options = Reward(
            remote_url=tuple(f"{name}={one}/get_reward,{two}/get_reward" for name in "ab"), weights=("a=0.5", "b=0.5")
        )
        client = RewardClient.from_options(options)
        assert [client.score(make_groups(1))[0].rewards for _ in range(4)] == [(1.0,), (2.0,), (1.0,), (2.0,)]
        client.close()
    assert (len(first.bodies), len(second.bodies)) == (4, 4)


def test_only_servers_are_asked_by_several_threads():
    assert client_of("http://127.0.0.1:1", concurrency=5).num_at_once == 5
    assert RewardClient.from_options(Reward(remote_url=("rewards/asr.py",), concurrency=5)).num_at_once == 1


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
        client = RewardClient.from_options(Reward(remote_url=(f"{base}/get_reward",)), backoff_s=30.0)
        threading.Timer(0.3, client.close).start()
        start = time.monotonic()
        with pytest.raises(RewardError, match="closed while retrying"):
            client.score(make_groups(1))
        assert time.monotonic() - start < 10


@pytest.mark.parametrize(
    "urls", [("reward.txt",), ("a.py", "b.py"), ("a.py", "http://h/x"), ("http://h:x/y",), ("a.py,http://h/x",), ("",)]
)
def test_unusable_urls(urls):
    with pytest.raises(ValueError, match=r"--reward\.remote_url is .*give one \.py or \.yaml file"):
        RewardClient.from_options(Reward(remote_url=urls))


def test_no_url():
    with pytest.raises(ValueError, match=r"--reward\.remote_url is missing"):
        RewardClient.from_options(Reward())


def test_metadata_that_is_not_json():
    utterance = Utterance("utt-nan", "ref", metadata={"snr": float("nan")})
    group = Group(Prompt(utterance, (7,), "p:"), (Rollout((1,), (-0.5,), "stop", 0, "x", "x"),))
    with pytest.raises(RewardError, match=r"can't be sent as JSON.*utt-nan"):
        client_of("http://127.0.0.1:9").score([group])


def test_groups_are_never_cut():
    sizes = [[len(group.rollouts) for group in batch] for batch in split_groups(make_groups(4, 4, 4, 9, 1, 8), 8)]
    assert sizes == [[4, 4], [4], [9], [1], [8]]


def test_logs_are_means_over_the_values_that_there_were():
    """One value of 1 beside 63 that abstain, and 64 zeros: 1/65, however the completions were cut into requests."""
    one = check_answer({"rewards": [0] * 64, "extra_logs": {"wer": [1] + [None] * 63}}, ["a"] * 64, "r.py")
    none = check_answer({"rewards": [0] * 64, "extra_logs": {"wer": [0] * 64}}, ["a"] * 64, "r.py")
    assert merge_answers([one, none]).extra_logs == {"wer": pytest.approx(1 / 65)}
    sent = [check_answer(reply(answer), ["a"] * 64, "http://x") for answer in (one, none)]  # over the wire
    assert merge_answers(sent).extra_logs == {"wer": pytest.approx(1 / 65)}


def test_merge_refuses_different_parts():
    with pytest.raises(RewardError, match="different parts"):
        merge_answers([RewardAnswer([1.0], {"cer": [1.0]}), RewardAnswer([1.0])])
    answers = [RewardAnswer([1.0], {"cer": [1.0]}, weights={"cer": weight}) for weight in (1.0, 2.0)]
    with pytest.raises(RewardError, match="different weights"):
        merge_answers(answers)


# --- Retry-After ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("7", 7.0),
        (" 7 ", 7.0),
        ("0", 0.0),
        ("9999", 120.0),
        ("Fri, 02 Jan 2026 00:00:20 GMT", 20.0),
        ("Fri, 02 Jan 2026 00:00:20 -0000", 20.0),
        ("Thu, 01 Jan 2026 00:00:00 GMT", 0.0),
        ("", 0.0),
        ("soon", 0.0),
        ("-3", 0.0),
    ],
)
def test_retry_after(header, expected):
    assert rest_s(header, datetime(2026, 1, 2, tzinfo=UTC)) == expected


class Waits(threading.Event):
    """Keeps what was to be waited for instead of waiting."""

    def __init__(self):
        super().__init__()
        self.seconds: list[float] = []

    def wait(self, timeout=None):
        self.seconds.append(timeout)
        return False


def test_a_replica_that_asks_for_rest_gets_it_and_the_other_does_not_wait(monkeypatch):
    first = Scripted((429, "busy"), headers={"retry-after": "50"})
    second = Scripted((503, "busy"), (200, '{"rewards": [2.0]}'))
    with running(first.app) as one, running(second.app) as two:
        client = client_of(one, two)
        monkeypatch.setattr(client._transport, "_closed", Waits())
        assert client.score(make_groups(1)) == [Scores((2.0,))]
    to_second, to_first, to_second_again = client._transport._closed.seconds
    assert 0.005 <= to_second <= 0.01 and 0.02 <= to_second_again <= 0.04
    assert 40 < to_first <= 50


# --- tokens ---------------------------------------------------------------------------------------------------------


def test_the_token_goes_to_every_server_and_into_no_message(monkeypatch):
    monkeypatch.setenv("REWARD_TOKEN", "s3cret")
    server = Scripted((200, '{"rewards": [1.0]}'), (400, "no"))
    with running(server.app) as base:
        client = client_of(base, token_env="REWARD_TOKEN")
        assert client.score(make_groups(1)) == [Scores((1.0,))]
        with pytest.raises(RewardError) as caught:
            client.score(make_groups(1))
    assert server.tokens == ["Bearer s3cret", "Bearer s3cret"]
    assert "s3cret" not in str(caught.value)


def test_without_a_token_none_is_sent():
    server = Scripted((200, '{"rewards": [1.0]}'))
    with running(server.app) as base:
        client_of(base).score(make_groups(1))
    assert server.tokens == [None]


@pytest.mark.parametrize(("value", "message"), [(None, "is not set"), ("", "is not set"), ("a b", "holds spaces")])
def test_a_variable_without_a_token_is_named(value, message, monkeypatch):
    monkeypatch.delenv("REWARD_TOKEN", raising=False)
    if value is not None:
        monkeypatch.setenv("REWARD_TOKEN", value)
    with pytest.raises(ValueError, match=rf"--reward\.token_env REWARD_TOKEN: .*{message}"):
        client_of("http://127.0.0.1:9", token_env="REWARD_TOKEN")


# --- parts from several places --------------------------------------------------------------------------------------


def test_parts_from_two_servers_and_a_file(tmp_path):
    cer = Scripted((200, '{"rewards": [0.2, 0.4], "parts": {"s": [1, 0]}, "extra_logs": {"n": 3}, "scores": [1, 1]}'))
    lm = Scripted((200, '{"rewards": [1.0, null]}'))
    path = tmp_path / "short.py"
    path.write_text("def reward_func(q, p, l, responses):\n    return [3.0 - len(r) for r in responses]\n")
    with running(cer.app) as one, running(lm.app) as two:
        options = Reward(
            remote_url=(f"cer={one}/get_reward", f"lm={two}/get_reward", f"short={path}"),
            weights=("lm=3", "cer=6", "short=1"),
        )
        client = RewardClient.from_options(options)
        client.probe()
        answer = client.answer(make_groups(2))
    assert answer.rewards == pytest.approx([(6 * 0.2 + 3 * 1.0 + 2.0) / 10, (6 * 0.4 + 1.0) / 7])
    assert answer.parts == {"cer": [0.2, 0.4], "cer/s": [1.0, 0.0], "lm": [1.0, None], "short": [2.0, 1.0]}
    assert answer.weights == {"cer": 6.0, "cer/s": 0.0, "lm": 3.0, "short": 1.0}
    assert (answer.extra_logs, answer.scores) == ({"cer/n": 3.0}, None)


def test_a_yaml_file_is_a_part(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("parts: {right: {metric: cer, shape: one_minus, weight: 1}}")
    options = Reward(remote_url=(f"asr={path}", f"same={path}"), weights=("asr=1", "same=0"))
    answer = RewardClient.from_options(options).answer(make_groups(2))
    assert answer.rewards == answer.parts["asr/right"] == [0.0, 0.0]  # "x" for "ref"
    assert answer.weights == {"asr": 1.0, "asr/right": 0.0, "same": 0.0, "same/right": 0.0}


def test_replicas_of_a_part(tmp_path):
    first, second = Scripted((200, '{"rewards": [1.0]}')), Scripted((200, '{"rewards": [3.0]}'))
    other = Scripted((200, '{"rewards": [5.0]}'))
    with running(first.app) as one, running(second.app) as two, running(other.app) as three:
        urls = (f"a={one}/get_reward,{two}/get_reward", f"b={three}/get_reward")
        client = RewardClient.from_options(Reward(remote_url=urls, weights=("a=1", "b=1"), batch_size=1))
        assert [scores.rewards for scores in client.score(make_groups(1, 1))] == [(3.0,), (4.0,)]
    assert (len(first.bodies), len(second.bodies), len(other.bodies)) == (1, 1, 2)


def test_a_part_that_fails_stops_the_run():
    good, bad = Scripted((200, '{"rewards": [1.0]}')), Scripted((400, "no such task"))
    with running(good.app) as one, running(bad.app) as two:
        urls = (f"a={one}/get_reward", f"b={two}/get_reward")
        client = RewardClient.from_options(Reward(remote_url=urls, weights=("a=1", "b=0")))
        with pytest.raises(RewardError, match=rf"POST {two}/get_reward answered 400: no such task \(samples utt-0\)"):
            client.score(make_groups(1))


def test_names_of_parts():
    assert reward_parts(Reward(remote_url=("http://h/x?k=v", "http://i/y"))) == (
        {"": ("http://h/x?k=v", "http://i/y")},
        {},
    )
    assert reward_parts(Reward(remote_url=("http://h/x, http://i/y",))) == ({"": ("http://h/x", "http://i/y")}, {})
    options = Reward(remote_url=("a=http://h/x?k=v", "b=f.py", "a=http://i/y"), weights=("b=0", "a=0.5"))
    assert reward_parts(options) == ({"a": ("http://h/x?k=v", "http://i/y"), "b": ("f.py",)}, {"b": 0.0, "a": 0.5})


def test_trial_asks_every_replica():
    good, elsewhere = Scripted((200, '{"rewards": [1.0]}')), FastAPI()
    with running(good.app) as one, running(elsewhere) as two:
        client = client_of(one, two)
        client.probe()  # both are up
        with pytest.raises(RewardError, match=f"POST {two}/get_reward answered 404"):
            client.trial(make_groups(1))
    other = Scripted((200, '{"rewards": [1.0], "parts": {"cer": [1.0]}}'))
    with running(good.app) as one, running(other.app) as two, pytest.raises(RewardError, match="different parts"):
        client_of(one, two).trial(make_groups(1))
    with running(good.app) as one, running(good.app) as two:
        assert client_of(one, two).trial(make_groups(1)) == [Scores((1.0,))]


# --- OpenRLHF's own server ------------------------------------------------------------------------------------------


def test_openrlhf_server():
    app = FastAPI()

    @app.post("/get_reward")
    async def get_reward(request: Request) -> Response:  # reads one key of the body, as OpenRLHF's serve_rm does
        data = await request.json()
        return JSONResponse({"rewards": [float(len(query)) for query in data.get("query")]})

    with running(app) as base:
        client = client_of(base)
        client.probe()
        assert client.trial(make_groups(2)) == [Scores((6.0, 7.0))]
