"""Serves a reward file over HTTP, with OpenRLHF's JSON keys and ours beside them.

One process takes the requests; `Workers` score them.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import math
import os
import re
import signal
import socket
import time
from base64 import b64decode
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from speechrl.config import ServeRewardConfig
from speechrl.data.audio import AudioError
from speechrl.reward.plugin import RewardAnswer, RewardError, RewardRequest
from speechrl.reward.workers import WorkerDied, Workers
from speechrl.settings import read_secret
from speechrl.speech.sound import sound_of_wav
from speechrl.types import FinishReason, Sound

KEEP_ALIVE_S = 30  # longer than clients keep idle connections, so that they don't send into one that we close
END_S = 30  # requests that are being scored when the server is told to end have this long
BACKLOG = 128  # connections that wait until the event loop takes them
BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
NO_TOKEN = "the server asks for a bearer token (--token_env)"


class RewardCall(BaseModel):
    """Body of POST /get_reward. The first three keys are OpenRLHF's; the others may be left out. Lists are N long."""

    model_config = ConfigDict(allow_inf_nan=False)

    query: list[str]
    prompts: list[str]
    labels: list[Any]  # strings from us; OpenRLHF sends on whatever its data set holds
    ids: list[str] | None = None
    responses: list[str] | None = None
    metadata: list[dict[str, Any]] | None = None
    languages: list[str | None] | None = None
    keywords: list[list[str]] | None = None
    audio_paths: list[str | None] | None = None
    durations_s: list[float | None] | None = None
    finish_reasons: list[FinishReason | None] | None = None
    raw_responses: list[str] | None = None
    generated_audio: list[str | None] | None = None  # base64 of sound files
    speaker_paths: list[str | None] | None = None

    @model_validator(mode="after")
    def _equal_lengths(self) -> RewardCall:
        for name, values in self:
            if values is not None and len(values) != len(self.query):
                raise ValueError(f"{name} has length {len(values)}, but query has {len(self.query)}")
        return self

    def to_request(self) -> RewardRequest:
        """Raises AudioError for generated audio that can't be read."""
        count = len(self.query)
        # Without `responses` the caller is OpenRLHF, whose query is the prompt followed by the completion.
        cut = [query.removeprefix(prompt) for query, prompt in zip(self.query, self.prompts, strict=True)]
        return RewardRequest(
            ids=_or(self.ids, [str(index) for index in range(count)]),
            queries=self.query,
            prompts=self.prompts,
            labels=self.labels,
            responses=_or(self.responses, cut),
            metadata=_or(self.metadata, [{} for _ in range(count)]),
            languages=_or(self.languages, [None] * count),
            keywords=_or(self.keywords, [[] for _ in range(count)]),
            audio_paths=_or(self.audio_paths, [None] * count),
            durations_s=_or(self.durations_s, [None] * count),
            finish_reasons=_or(self.finish_reasons, [None] * count),
            raw_responses=_or(self.raw_responses, cut),
            generated_audio=[_sound(text) for text in _or(self.generated_audio, [None] * count)],
            speaker_paths=_or(self.speaker_paths, [None] * count),
        )


class RewardReply(BaseModel):
    """Answer of POST /get_reward: as many values as completions in each list. null abstains.

    `scores` is there only if the reward file returns it; a log is its mean, once for each completion, and
    `log_counts` how many values that is of. `weights` has one number for each part, or none. `heard` has a text for
    each completion, if the reward tells it.
    """

    rewards: list[float | None]
    scores: list[float | None] | None = None
    extra_logs: dict[str, list[float]] = {}
    parts: dict[str, list[float | None]] = {}
    weights: dict[str, float] = {}
    log_counts: dict[str, int] = {}
    heard: list[str] = []


def _sound(text: str | None) -> Sound | None:
    try:
        return None if text is None else sound_of_wav(b64decode(text, validate=True))
    except ValueError as error:  # AudioError is one, too
        raise AudioError(f"generated_audio: {error}") from error


def _or(given: list | None, default: list) -> list:
    return default if given is None else given


def make_app(workers: Workers, options: ServeRewardConfig, token: str = "") -> FastAPI:
    """POST /get_reward, GET /health, /schema and /metrics. With a token all but /health ask for it.

    A refusal is {"error": text, "retry": bool}; clients of ours try again unless "retry" is false.
    """
    app = FastAPI(title=f"speechrl reward {Path(options.file).name}", docs_url=None, redoc_url=None, openapi_url=None)
    desk = Desk(workers, options, token)
    app.post("/get_reward")(desk.get_reward)
    app.get("/schema")(desk.schema)
    app.get("/metrics")(desk.metrics)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok", "plugin": options.file, "workers": workers.count}

    return app


class Desk:
    """Takes requests in order, keeps those that wait few, and hands each to a worker. Runs in one event loop."""

    def __init__(self, workers: Workers, options: ServeRewardConfig, token: str) -> None:
        self._workers = workers
        self._max_bytes = int(options.max_request_mb * 1e6)
        self._max_mb = options.max_request_mb
        self._max_pending = workers.count + options.max_queue
        self._pending = 0  # waiting or being scored
        self._token = token
        self._audio_root = os.path.realpath(options.audio_root) if options.audio_root else ""
        self._free = asyncio.Semaphore(workers.count)
        self._threads = ThreadPoolExecutor(workers.count, thread_name_prefix="reward-worker")
        self._meters = Meters(lambda: max(self._pending - workers.count, 0), lambda: workers.num_restarts)

    async def get_reward(self, request: Request) -> Response:
        response = await self._answer(request)
        self._meters.requests.labels(response.status_code).inc()
        return response

    async def schema(self, request: Request) -> Response:
        if not self._allows(request):
            return refuse(401, NO_TOKEN)
        return JSONResponse({"request": RewardCall.model_json_schema(), "answer": RewardReply.model_json_schema()})

    async def metrics(self, request: Request) -> Response:
        if not self._allows(request):
            return refuse(401, NO_TOKEN)
        return Response(generate_latest(self._meters.registry), media_type=CONTENT_TYPE_LATEST)

    def _allows(self, request: Request) -> bool:
        if not self._token:
            return True
        given = request.headers.get("authorization", "").encode()
        return hmac.compare_digest(given, f"Bearer {self._token}".encode())

    async def _answer(self, request: Request) -> Response:
        if not self._allows(request):
            return refuse(401, NO_TOKEN)
        body = await read_body(request, self._max_bytes)
        if body is None:
            return refuse(413, f"the request is longer than --max_request_mb {self._max_mb:g} of the reward server")
        if self._pending >= self._max_pending:
            queue = self._max_pending - self._workers.count
            return refuse(429, f"{queue} requests wait already (--max_queue of the reward server)", self._busy_for_s())
        try:
            call = RewardCall.model_validate_json(body)
            scored = call.to_request()
        except AudioError as error:
            return refuse(422, str(error))
        except ValidationError as error:
            faults = [": ".join([*map(str, fault["loc"]), fault["msg"]]) for fault in error.errors()]
            return refuse(422, "; ".join(faults))
        if strange := outside(self._audio_root, call.audio_paths or []):
            return refuse(422, f"audio_paths: {strange} does not lie in the reward server's --audio_root")
        if not call.query:
            return JSONResponse({"rewards": []})
        self._pending += 1
        try:
            async with self._free:
                if await request.is_disconnected():  # it waited too long, and may be back already
                    return refuse(503, "the client has gone")
                return await self._score(scored)
        finally:
            self._pending -= 1

    async def _score(self, request: RewardRequest) -> Response:
        start_s = time.perf_counter()
        try:
            answer = await asyncio.get_running_loop().run_in_executor(self._threads, self._workers.score, request)
        except RewardError as error:
            self._meters.failures.inc()
            return refuse(500, str(error))
        except WorkerDied as error:
            self._meters.failures.inc()
            return refuse(503, str(error), 0)
        finally:
            self._meters.seconds.observe(time.perf_counter() - start_s)
        self._meters.completions.inc(len(answer.rewards))
        return JSONResponse(reply(answer))

    def _busy_for_s(self) -> int:
        """When the queue should have room again, in whole seconds."""
        return max(1, math.ceil(self._meters.mean_s() * self._pending / self._workers.count))


class Meters:
    """What /metrics shows of one server."""

    def __init__(self, queue_length: Callable[[], float], num_restarts: Callable[[], float]) -> None:
        self.registry = CollectorRegistry()
        prefix = "speechrl_reward"
        self.requests = Counter(f"{prefix}_requests", "Answered POSTs", ["status"], registry=self.registry)
        self.completions = Counter(f"{prefix}_completions", "Completions scored", registry=self.registry)
        self.failures = Counter(f"{prefix}_failures", "Calls that raised or lost their worker", registry=self.registry)
        self.seconds = Histogram(
            f"{prefix}_seconds", "Of one call of the reward, without waiting", buckets=BUCKETS_S, registry=self.registry
        )
        Gauge(f"{prefix}_queue_length", "Requests that wait", registry=self.registry).set_function(queue_length)
        Gauge(f"{prefix}_worker_restarts", "Workers replaced", registry=self.registry).set_function(num_restarts)

    def mean_s(self) -> float:
        """Mean seconds of the calls so far; 0 before the first."""
        values = {sample.name: sample.value for metric in self.seconds.collect() for sample in metric.samples}
        count = values["speechrl_reward_seconds_count"]
        return values["speechrl_reward_seconds_sum"] / count if count else 0.0


def outside(root: str, paths: Sequence[str | None]) -> str:
    """The first path ("file", or "folder[row]" of a dataset) that does not lie in the real folder `root`, links
    followed; "" when all do, or there is no root.
    """
    for path in paths if root else ():
        if path is not None and not _lies_in(root, re.sub(r"\[\d+\]$", "", path)):
            return path
    return ""


def _lies_in(root: str, path: str) -> bool:
    try:
        return os.path.commonpath([root, os.path.realpath(path)]) == root
    except ValueError:  # a null character in it
        return False


async def read_body(request: Request, max_bytes: int) -> bytes | None:
    """None as soon as it is longer; uvicorn then takes the rest of it and throws it away."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            return None
    return bytes(body)


def refuse(status: int, error: str, retry_after_s: int | None = None) -> JSONResponse:
    """An error's answer; given seconds, it may be tried again after them."""
    headers = {} if retry_after_s is None else {"retry-after": str(retry_after_s)}
    return JSONResponse({"error": error, "retry": retry_after_s is not None}, status, headers)


def reply(answer: RewardAnswer) -> dict[str, Any]:
    """As JSON. OpenRLHF concatenates `scores`, if there is the key, and each log: so no null, and lists for logs."""
    count = len(answer.rewards)
    body = {name: value for name, value in vars(answer).items() if value is not None}
    return body | {"extra_logs": {name: [mean] * count for name, mean in answer.extra_logs.items()}}


def serve(options: ServeRewardConfig) -> None:
    """Serves until interrupted. ValueError if the file doesn't load, at first or when a worker is replaced."""
    token = read_secret(options.token_env, "--token_env")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)
    with bind(options.host, options.port) as listener:
        host, port = listener.getsockname()[:2]
        workers = Workers(options.file, options.workers)
        try:
            app = make_app(workers, options, token)
            server = uvicorn.Server(
                uvicorn.Config(app, log_level="info", timeout_keep_alive=KEEP_ALIVE_S, timeout_graceful_shutdown=END_S)
            )
            workers.on_failure = lambda: setattr(server, "should_exit", True)
            listener.listen(BACKLOG)
            print(f"serving {options.file} at http://{host}:{port}/get_reward, workers: {options.workers}", flush=True)
            if not token and not ipaddress.ip_address(host).is_loopback:
                print(f"warning: --host {options.host} without --token_env: whoever reaches the port can use it")
            if not options.audio_root and not ipaddress.ip_address(host).is_loopback:
                print(f"warning: --host {options.host} without --audio_root: {options.file} is given any path")
            server.run(sockets=[listener])
        finally:
            workers.close()
    if workers.failure:
        raise ValueError(workers.failure)


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that doesn't listen yet: who asks before the workers are ready is refused, not kept waiting."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ValueError(f"--host {host} --port {port}: can't listen there ({error.strerror}); take another") from error
    return listener
