"""Scores groups with a reward file in this process, or with one or more reward servers over HTTP."""

from __future__ import annotations

import json
import logging
import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from speechrl.reward.plugin import (
    RewardAnswer,
    RewardError,
    RewardPlugin,
    RewardRequest,
    answer_to_scores,
    check_answer,
    name_samples,
)
from speechrl.reward.recipe import SUFFIXES
from speechrl.sections import Reward
from speechrl.types import Group, Scores

log = logging.getLogger(__name__)

LONGEST_BACKOFF_S = 30.0
BODY_CHARS = 300  # of a server's answer, in messages


class RewardClient:
    """The reward of a run, wherever it is computed.

    remote_url: one .py or .yaml file, or http(s) URLs of replicas that serve the same reward. HTTP requests hold whole
    groups, as many as fit in `batch_size` completions (one at least), so a reward may compare the samples of a group.
    Transport errors, 429 and 5xx are tried again on the next replica, unless the server says that it's no use.
    """

    def __init__(
        self,
        remote_url: Sequence[str],
        *,
        timeout_s: float = 60.0,
        max_retries: int = 5,
        concurrency: int = 8,
        batch_size: int = 64,
        backoff_s: float = 0.5,
    ) -> None:
        """backoff_s: wait before the first retry, doubled by each further one. ValueError names --reward.remote_url."""
        urls = remote_url.split(",") if isinstance(remote_url, str) else list(remote_url)
        self._urls = [url.strip() for url in urls]
        self._plugin = RewardPlugin.load(self._urls[0]) if _names_file(self._urls) else None
        self._timeout_s = timeout_s
        self._max_retries = max_retries
        self._batch_size = batch_size
        self._backoff_s = backoff_s
        self._closed = threading.Event()
        self._http = httpx.Client(timeout=timeout_s, limits=httpx.Limits(max_connections=concurrency))
        self._threads = ThreadPoolExecutor(concurrency, thread_name_prefix="reward")

    @classmethod
    def from_options(cls, options: Reward) -> RewardClient:
        """The client that the --reward options describe."""
        return cls(
            options.remote_url,
            timeout_s=options.timeout_s,
            max_retries=options.max_retries,
            concurrency=options.concurrency,
            batch_size=options.batch_size,
        )

    def score(self, groups: Sequence[Group]) -> list[Scores]:
        """One `Scores` per group. RewardError names the samples; nothing is returned in place of a failed reward."""
        return answer_to_scores(self.answer(groups), groups)

    def answer(self, groups: Sequence[Group]) -> RewardAnswer:
        """Like `score`, flat, with the reward's own logs."""
        if not groups:
            return RewardAnswer([])
        if self._plugin is not None:
            return self._plugin.score(RewardRequest.from_groups(groups))
        requests = [RewardRequest.from_groups(batch) for batch in split_groups(groups, self._batch_size)]
        futures = [self._threads.submit(self._ask, index, request) for index, request in enumerate(requests)]
        try:
            answers = [future.result() for future in futures]
        finally:
            for future in futures:  # after the first failure the rest is of no use; no effect on those that are done
                future.cancel()
        return merge_answers(answers)

    def probe(self) -> None:
        """Checks before training that the reward can be had. RewardError says what failed.

        A file was loaded when the client was built. A server is asked for /health beside its reward path; a server
        that answers 404 or 405 is up and merely has no such path.
        """
        if self._plugin is not None:
            return
        for url in self._urls:
            health = httpx.URL(url).join("health")
            try:
                response = self._http.get(health)
            except httpx.TransportError as error:
                raise RewardError(
                    f"--reward.remote_url: no reward server at {url} (GET {health}: {type(error).__name__}: {error}); "
                    "start one with `speechrl serve-reward FILE`"
                ) from error
            if response.is_error and response.status_code not in (404, 405):
                raise RewardError(f"--reward.remote_url: GET {health} {_describe(response)}")

    def close(self) -> None:
        """Ends waiting retries and the connections. A client that is closed can't score."""
        self._closed.set()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._http.close()

    def _ask(self, index: int, request: RewardRequest) -> RewardAnswer:
        """One request, tried until it is answered. Replicas take turns: by request, and again by try."""
        body = encode_request(request)
        fault = ""
        for attempt in range(self._max_retries + 1):
            if attempt:
                log.warning("reward: %s; try %d of %d follows", fault, attempt + 1, self._max_retries + 1)
                if self._closed.wait(self._delay_s(attempt)):
                    raise RewardError(f"the reward client was closed while retrying ({fault})")
            url = self._urls[(index + attempt) % len(self._urls)]
            try:
                response = self._http.post(url, content=body, headers={"content-type": "application/json"})
            except httpx.TransportError as error:
                reason = f"{type(error).__name__}: {error}"
                if isinstance(error, httpx.TimeoutException):
                    reason += f" (--reward.timeout_s is {self._timeout_s:g})"
                fault = f"POST {url} failed: {reason}"
                continue
            if response.is_success:
                return check_answer(_decode(response, url, request), request.ids, url)
            fault = f"POST {url} {_describe(response)}"
            if not _may_retry(response):
                raise RewardError(f"{fault} ({name_samples(request.ids)})")
        tries = self._max_retries + 1
        raise RewardError(f"no reward after {tries} tries; the last: {fault} ({name_samples(request.ids)})")

    def _delay_s(self, attempt: int) -> float:
        # Jitter between half and the whole keeps requests that failed together from coming back together.
        longest_s = min(self._backoff_s * 2 ** (attempt - 1), LONGEST_BACKOFF_S)
        return longest_s * random.uniform(0.5, 1.0)


def _names_file(urls: Sequence[str]) -> bool:
    """True for one .py or .yaml file, False for http(s) URLs, ValueError for anything else."""
    if len(urls) == 1 and urls[0].endswith((".py", *SUFFIXES)) and "://" not in urls[0]:
        return True
    if urls and all(_is_http(url) for url in urls):
        return False
    raise ValueError(f"--reward.remote_url is {','.join(urls)!r}; give one .py or .yaml file, or http(s) URLs")


def _is_http(text: str) -> bool:
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL:
        return False
    return url.scheme in ("http", "https") and bool(url.host)


def split_groups(groups: Sequence[Group], batch_size: int) -> list[list[Group]]:
    """Cuts into runs of whole groups of at most `batch_size` completions; a larger group is a run of its own."""
    batches: list[list[Group]] = []
    room = 0
    for group in groups:
        size = len(group.rollouts)
        if not batches or size > room:
            batches.append([])
            room = batch_size
        batches[-1].append(group)
        room -= size
    return batches


def encode_request(request: RewardRequest) -> bytes:
    """OpenRLHF's JSON keys (query, prompts, labels), ours beside them. RewardError if metadata isn't JSON."""
    body: dict[str, Any] = {"query" if name == "queries" else name: value for name, value in vars(request).items()}
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise RewardError(
            f"a reward request can't be sent as JSON: {error} ({name_samples(request.ids)}); "
            "metadata and durations in the manifest must be plain JSON values"
        ) from error


def merge_answers(answers: Sequence[RewardAnswer]) -> RewardAnswer:
    """Joins the answers of consecutive requests; logs are means weighted by completions."""
    names = {tuple(sorted(answer.parts)) for answer in answers}
    if len(names) > 1:
        raise RewardError(f"the reward gave different parts: {sorted(names)}; do all servers serve the same file?")
    if any(answer.weights != answers[0].weights for answer in answers):
        weights = [answer.weights for answer in answers]
        raise RewardError(f"the reward gave different weights: {weights}; do all servers serve the same file?")
    scores = [answer.scores for answer in answers if answer.scores is not None]
    logs = {name: _weighted_log(name, answers) for answer in answers for name in answer.extra_logs}
    return RewardAnswer(
        rewards=[reward for answer in answers for reward in answer.rewards],
        parts={name: [value for answer in answers for value in answer.parts[name]] for name in answers[0].parts},
        extra_logs=logs,
        scores=[value for values in scores for value in values] if len(scores) == len(answers) else None,
        weights=answers[0].weights,
    )


def _weighted_log(name: str, answers: Sequence[RewardAnswer]) -> float:
    pairs = [(answer.extra_logs[name], len(answer.rewards)) for answer in answers if name in answer.extra_logs]
    return sum(value * size for value, size in pairs) / sum(size for _, size in pairs)


def _decode(response: httpx.Response, url: str, request: RewardRequest) -> Any:
    try:
        return json.loads(response.text, parse_constant=_refuse_constant)
    except ValueError as error:
        raise RewardError(
            f"{url}: the answer is not JSON ({error}): {response.text[:BODY_CHARS]!r} ({name_samples(request.ids)})"
        ) from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number, and no reward")


def _describe(response: httpx.Response) -> str:
    return f"answered {response.status_code}: {response.text[:BODY_CHARS]}"


def _may_retry(response: httpx.Response) -> bool:
    """429 and 5xx, unless the body says "retry": false, as our server does for an error that would come back."""
    if response.status_code != 429 and response.status_code < 500:
        return False
    try:
        body = response.json()
    except ValueError:
        return True  # a proxy's error page
    return not (isinstance(body, dict) and body.get("retry") is False)
