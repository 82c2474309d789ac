"""What the tests of reward client and server share."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from speechrl.config import ServeRewardConfig
from speechrl.reward.client import RewardClient
from speechrl.reward.server import make_app
from speechrl.reward.workers import Workers
from speechrl.sections import Reward
from speechrl.types import Group, Prompt, Rollout, Utterance


@contextlib.contextmanager
def running(app: FastAPI) -> Iterator[str]:
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


@contextlib.contextmanager
def serving(path: Path, token: str = "", **options) -> Iterator[str]:
    """The address of a server of the file; it ends with the block, and so do its workers."""
    config = ServeRewardConfig(file=str(path), **options)
    workers = Workers(config.file, config.workers)
    try:
        with running(make_app(workers, config, token)) as base:
            yield base
    finally:
        workers.close()
        assert [worker.process.exitcode is not None for worker in workers._all].count(False) == 0


def make_groups(*sizes: int) -> list[Group]:
    """Groups utt-0, utt-1, ... of these sizes; the g-th response is g + 1 letters long."""
    groups = []
    for index, size in enumerate(sizes):
        utterance = Utterance(f"utt-{index}", "ref", metadata={"index": index})
        rollouts = tuple(Rollout((1,), (-0.5,), "stop", 0, f"<t>{'x' * g}", "x" * g) for g in range(1, size + 1))
        groups.append(Group(Prompt(utterance, (7,), "p:"), rollouts))
    return groups


def client_of(*bases: str, **options) -> RewardClient:
    urls = tuple(f"{base}/get_reward" for base in bases)
    return RewardClient.from_options(Reward(remote_url=urls, **options), backoff_s=0.01)
