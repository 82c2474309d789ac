"""The reward of a run: a file in this process, servers over HTTP, or named parts from several of both."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import count

import httpx

from speechrl.cross_checks import reward_parts
from speechrl.reward.compose import weighted_sum
from speechrl.reward.plugin import RewardAnswer, RewardError, RewardPlugin, RewardRequest, answer_to_scores, join_named
from speechrl.reward.recipe import SUFFIXES
from speechrl.reward.transport import FIRST_BACKOFF_S, Transport
from speechrl.sections import Reward
from speechrl.types import Group, Scores

# the name of a secret in a URL's query
SECRET = re.compile(r"(?:^|[&_-])(?:api|access|auth)?[_-]?(?:token|key|secret|password|auth)=", re.IGNORECASE)


class RewardClient:
    """Scores groups, wherever the reward is computed.

    files, servers: what gives each part, by its name; a server is a tuple of URLs, its replicas. A reward without names
    has one entry named "" and no weights. HTTP requests hold whole groups, as many as fit in `batch_size`
    completions (one at least), so a reward may compare the samples of a group.
    """

    def __init__(
        self,
        files: Mapping[str, RewardPlugin],
        servers: Mapping[str, tuple[str, ...]],
        weights: Mapping[str, float],
        transport: Transport,
        batch_size: int,
    ) -> None:
        self._files, self._servers, self._weights = files, servers, weights
        self._transport = transport
        self._batch_size = batch_size
        self._turns = {name: count() for name in servers}  # whose turn it is among replicas, over all calls

    @property
    def num_at_once(self) -> int:
        """Calls of `answer` that may run side by side: a reward file is asked by one thread alone."""
        return 1 if self._files else self._transport.concurrency

    @classmethod
    def from_options(cls, options: Reward, *, backoff_s: float = FIRST_BACKOFF_S) -> RewardClient:
        """The client that the --reward options describe; loads files. ValueError names --reward.remote_url."""
        parts, weights = reward_parts(options)
        if not parts:
            raise ValueError("--reward.remote_url is missing: give a reward file, or a URL")
        in_files = {name: _names_file(name, places) for name, places in parts.items()}
        files = {name: RewardPlugin.load(places[0]) for name, places in parts.items() if in_files[name]}
        servers = {name: places for name, places in parts.items() if not in_files[name]}
        return cls(files, servers, weights, Transport(options, backoff_s), options.batch_size)

    def score(self, groups: Sequence[Group]) -> list[Scores]:
        """One `Scores` per group. RewardError names the samples; nothing is returned in place of a failed reward."""
        return answer_to_scores(self.answer(groups), groups)

    def answer(self, groups: Sequence[Group]) -> RewardAnswer:
        """Like `score`, flat, with the reward's own logs."""
        if not groups:
            return RewardAnswer([])
        requests = [RewardRequest.from_groups(batch) for batch in split_groups(groups, self._batch_size)]
        futures = {
            name: [self._transport.submit(replicas, next(self._turns[name]), request) for request in requests]
            for name, replicas in self._servers.items()
        }
        try:
            found = {name: plugin.score(RewardRequest.from_groups(groups)) for name, plugin in self._files.items()}
            found |= {name: merge_answers([one.result() for one in several]) for name, several in futures.items()}
        finally:
            for several in futures.values():
                for future in several:  # after the first failure the rest is of no use; no effect on those done
                    future.cancel()
        if not self._weights:
            return found[""]
        answers = {name: found[name] for name in self._weights}
        rewards = weighted_sum({name: answer.rewards for name, answer in answers.items()}, self._weights)
        return join_named(answers, rewards, self._weights)

    def trial(self, groups: Sequence[Group]) -> list[Scores]:
        """Like `score`, and every replica is asked, so that a wrong path or token of any is told before training.

        RewardError if replicas of one reward give different parts.
        """
        request = RewardRequest.from_groups(groups)
        for replicas in self._servers.values():
            if len(replicas) > 1:
                merge_answers([self._transport.ask((url,), 0, request) for url in replicas])
        return self.score(groups)

    def probe(self) -> None:
        """Checks before training that all servers are up; files were loaded when the client was built."""
        for replicas in self._servers.values():
            for url in replicas:
                self._transport.probe(url)

    def close(self) -> None:
        """Ends waiting retries and the connections. A client that is closed can't score."""
        self._transport.close()


def _names_file(name: str, places: Sequence[str]) -> bool:
    """True for one .py or .yaml file, False for http(s) URLs, ValueError for anything else."""
    if len(places) == 1 and places[0].endswith((".py", *SUFFIXES)) and "://" not in places[0]:
        return True
    if any(SECRET.search(place.partition("?")[2]) for place in places):
        raise ValueError("--reward.remote_url: a URL with a secret in it; give a token with --reward.token_env")
    if places and all(_is_http(place) for place in places):
        return False
    if any("@" in place.partition("://")[2].partition("/")[0] for place in places):
        # not repeated here: it may be a password, and URLs go into logs and into the run's config
        raise ValueError("--reward.remote_url: a URL with a user or a password; give a token with --reward.token_env")
    given = f"{name}={','.join(places)}" if name else ",".join(places)
    raise ValueError(f"--reward.remote_url is {given!r}; give one .py or .yaml file, or http(s) URLs")


def _is_http(text: str) -> bool:
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL:
        return False
    return url.scheme in ("http", "https") and bool(url.host) and not url.userinfo


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


def merge_answers(answers: Sequence[RewardAnswer]) -> RewardAnswer:
    """Joins the answers of consecutive requests; logs are means over all the values that they had."""
    names = {tuple(sorted(answer.parts)) for answer in answers}
    if len(names) > 1:
        raise RewardError(f"the reward gave different parts: {sorted(names)}; do all servers serve the same file?")
    if any(answer.weights != answers[0].weights for answer in answers):
        weights = [answer.weights for answer in answers]
        raise RewardError(f"the reward gave different weights: {weights}; do all servers serve the same file?")
    scores = [answer.scores for answer in answers if answer.scores is not None]
    counts: dict[str, int] = {}
    sums: dict[str, float] = {}
    for answer in answers:
        for name, mean in answer.extra_logs.items():
            count = answer.log_counts[name]
            counts[name] = counts.get(name, 0) + count
            sums[name] = sums.get(name, 0.0) + mean * count
    return RewardAnswer(
        rewards=[reward for answer in answers for reward in answer.rewards],
        parts={name: [value for answer in answers for value in answer.parts[name]] for name in answers[0].parts},
        extra_logs={name: sums[name] / counts[name] for name in sums},
        scores=[value for values in scores for value in values] if len(scores) == len(answers) else None,
        weights=answers[0].weights,
        log_counts=counts,
        heard=[text for answer in answers for text in answer.heard],
    )
