"""Requests to reward servers: a pool of connections, a bounded number in flight, and what is tried again."""

from __future__ import annotations

import json
import logging
import random
import threading
import time
from base64 import b64encode
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from speechrl.reward.plugin import RewardAnswer, RewardError, RewardRequest, check_answer, name_samples
from speechrl.sections import Reward
from speechrl.settings import read_secret
from speechrl.speech.sound import wav_bytes

log = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 30.0
LONGEST_REST_S = 120.0  # of what a server's Retry-After may ask for
OF_THE_WIRE = ("content-encoding", "content-length", "transfer-encoding")  # undone once an answer is read
BODY_CHARS = 300  # of a server's answer, in messages


class Transport:
    """Sends requests to reward servers and checks their answers.

    Transport errors, 429 and 5xx are tried again on the next replica, unless the server says that it's no use.
    """

    def __init__(self, options: Reward, backoff_s: float = FIRST_BACKOFF_S) -> None:
        """backoff_s: wait before the first retry, doubled by each further one. ValueError names --reward.token_env."""
        token = read_secret(options.token_env, "--reward.token_env")
        self._timeout_s = options.timeout_s
        self._max_retries = options.max_retries
        self._backoff_s = backoff_s
        self._closed = threading.Event()
        self._http = httpx.Client(
            timeout=options.timeout_s,
            limits=httpx.Limits(max_connections=options.concurrency),
            headers={"content-type": "application/json"} | ({"authorization": f"Bearer {token}"} if token else {}),
        )
        self.concurrency = options.concurrency
        self._threads = ThreadPoolExecutor(options.concurrency, thread_name_prefix="reward")

    def submit(self, replicas: Sequence[str], index: int, request: RewardRequest) -> Future[RewardAnswer]:
        """Starts `ask` as soon as fewer than --reward.concurrency requests are in flight."""
        return self._threads.submit(self.ask, replicas, index, request)

    def ask(self, replicas: Sequence[str], index: int, request: RewardRequest) -> RewardAnswer:
        """One request, tried until it is answered. Replicas take turns: by index, and again by try.

        RewardError names the URL, the last fault and the samples.
        """
        body = encode_request(request)
        rests_until: dict[str, float] = {}  # by the clock of time.monotonic
        fault = ""
        for attempt in range(self._max_retries + 1):
            url = replicas[(index + attempt) % len(replicas)]
            if attempt:
                wait_s = max(self._delay_s(attempt), rests_until.get(url, 0.0) - time.monotonic())
                log.warning("reward: %s; try %d of %d in %.1f s", fault, attempt + 1, self._max_retries + 1, wait_s)
                if self._closed.wait(wait_s):
                    raise RewardError(f"the reward client was closed while retrying ({fault})")
            try:
                response = self._post(url, body)
            except httpx.RequestError as error:  # of the transport, or an answer that is not encoded as it says
                fault = f"POST {url} failed: {self._explain(error)}"
                continue
            if response.is_success:
                return check_answer(_decode(response, url, request), request.ids, url)
            fault = f"POST {url} {_describe(response)}"
            if not _may_retry(response):
                raise RewardError(f"{fault} ({name_samples(request.ids)})")
            rests_until[url] = time.monotonic() + rest_s(response.headers.get("retry-after", ""), datetime.now(UTC))
        tries = self._max_retries + 1
        raise RewardError(f"no reward after {tries} tries; the last: {fault} ({name_samples(request.ids)})")

    def _post(self, url: str, body: bytes) -> httpx.Response:
        """The whole answer within --reward.timeout_s. httpx bounds each read alone, so that an answer which comes byte
        by byte would hold the run for ever.
        """
        ends = time.monotonic() + self._timeout_s
        parts = []
        with self._http.stream("POST", url, content=body) as response:
            for part in response.iter_bytes():
                parts.append(part)
                if time.monotonic() > ends:
                    raise httpx.ReadTimeout("the answer comes too slowly", request=response.request)
        headers = {name: value for name, value in response.headers.items() if name not in OF_THE_WIRE}
        return httpx.Response(response.status_code, headers=headers, content=b"".join(parts), request=response.request)

    def probe(self, url: str) -> None:
        """Asks for /health beside the reward's path. RewardError unless the server answers.

        A server that answers 404 or 405 is up and merely has no such path.
        """
        health = httpx.URL(url).join("health")
        try:
            response = self._http.get(health)
        except httpx.RequestError as error:
            raise RewardError(
                f"--reward.remote_url: no reward server at {url} (GET {health}: {self._explain(error)}); "
                "start one with `speechrl serve-reward FILE`"
            ) from error
        if response.is_error and response.status_code not in (404, 405):
            raise RewardError(f"--reward.remote_url: GET {health} {_describe(response)}")

    def close(self) -> None:
        """Ends waiting retries and the connections."""
        self._closed.set()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._http.close()

    def _delay_s(self, attempt: int) -> float:
        # Jitter between half and the whole keeps requests that failed together from coming back together.
        longest_s = min(self._backoff_s * 2 ** (attempt - 1), LONGEST_BACKOFF_S)
        return longest_s * random.uniform(0.5, 1.0)

    def _explain(self, error: httpx.RequestError) -> str:
        timeout = isinstance(error, httpx.TimeoutException)
        return f"{type(error).__name__}: {error}" + (f" (--reward.timeout_s is {self._timeout_s:g})" if timeout else "")


def encode_request(request: RewardRequest) -> bytes:
    """OpenRLHF's JSON keys (query, prompts, labels), ours beside them; sounds as base64 of wav files. RewardError if
    metadata isn't JSON.
    """
    body: dict[str, Any] = {"query" if name == "queries" else name: value for name, value in vars(request).items()}
    sounds, voices = body.pop("generated_audio"), body.pop("speaker_paths")
    if any(voices):
        body["speaker_paths"] = voices
    if any(sounds):
        body["generated_audio"] = [None if item is None else b64encode(wav_bytes(item)).decode() for item in sounds]
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise RewardError(
            f"a reward request can't be sent as JSON: {error} ({name_samples(request.ids)}); "
            "metadata and durations in the manifest must be plain JSON values"
        ) from error


def rest_s(retry_after: str, now: datetime) -> float:
    """Seconds that a Retry-After header asks for (RFC 9110: seconds or a date), in [0, LONGEST_REST_S]; 0 without one.

    A header that is neither is none: it is a hint of somebody else's server, and the backoff holds without it.
    """
    if retry_after.strip().isdecimal():
        return min(float(retry_after), LONGEST_REST_S)
    try:
        then = parsedate_to_datetime(retry_after)
    except ValueError:
        return 0.0
    seconds = (then if then.tzinfo else then.replace(tzinfo=UTC)) - now
    return min(max(seconds.total_seconds(), 0.0), LONGEST_REST_S)


def _decode(response: httpx.Response, url: str, request: RewardRequest) -> Any:
    try:
        answer = json.loads(response.text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise RewardError(
            f"{url}: the answer is not JSON ({error}): {response.text[:BODY_CHARS]!r} ({name_samples(request.ids)})"
        ) from error
    if "\\ud" in response.text or "\\uD" in response.text:  # UTF-8 has no surrogates; an escape may be one
        try:
            json.dumps(answer, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise RewardError(
                f"{url}: the answer holds {error.object[error.start]!r}, half of a surrogate pair, which no file "
                f"could hold ({name_samples(request.ids)})"
            ) from None
    return answer


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number, and no reward")


HINTS = {
    401: "; set --reward.token_env to the environment variable that holds the server's token",
    403: "; is the token in --reward.token_env the server's?",
    413: "; a smaller --reward.batch_size makes smaller requests",
}


def _describe(response: httpx.Response) -> str:
    hint = HINTS.get(response.status_code, "")
    if response.has_redirect_location:
        hint = f"; redirects are not followed: give the address that it names, {response.headers['location']}"
    return f"answered {response.status_code}: {response.text[:BODY_CHARS]}{hint}"


def _may_retry(response: httpx.Response) -> bool:
    """429 and 5xx, unless the body says "retry": false, as our server does for an error that would come back."""
    if response.status_code != 429 and response.status_code < 500:
        return False
    try:
        body = response.json()
    except (ValueError, RecursionError):
        return True  # a proxy's error page
    return not (isinstance(body, dict) and body.get("retry") is False)
