"""Processes that score for a reward server, each with the reward file loaded.

A file may hold a model, crash, or be killed for memory: it does so in a process of its own, and the server stays.
"""

from __future__ import annotations

import multiprocessing
import queue
import signal
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

from speechrl.reward.plugin import RewardAnswer, RewardError, RewardPlugin, RewardRequest, name_samples

SPAWN = multiprocessing.get_context("spawn")  # a forked child would share the server's sockets, locks and CUDA state
END_S = 5.0  # a worker has this long to end by itself


class WorkerDied(Exception):
    """A worker ended while it scored. The next call starts another."""


@dataclass(frozen=True)
class Worker:
    """One process and our end of the pipe to it."""

    process: SpawnProcess
    pipe: Connection

    def wait_loaded(self) -> None:
        """Until the file is loaded. ValueError with the reason when it can't be."""
        try:
            fault = self.pipe.recv()
        except EOFError:
            self.process.join(END_S)
            fault = f"a worker ended with exit code {self.process.exitcode} while it loaded the reward file"
        if fault:
            raise ValueError(fault)


class Workers:
    """`count` processes. `score` may be called from as many threads; more of them wait for each other.

    on_failure: called once no worker can take the place of one that died; `failure` says why.
    """

    def __init__(self, path: str, count: int) -> None:
        """Starts the processes and waits until all have loaded the file. ValueError with the reason when one can't."""
        self.path = path
        self.count = count
        self.num_restarts = 0
        self.failure = ""
        self.on_failure: Callable[[], None] = lambda: None
        self._closing = False
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        self._all: list[Worker] = []  # those that died among them
        try:
            for _ in range(count):
                self._all.append(start(path))
            for worker in list(self._all):
                worker.wait_loaded()
                self._idle.put(worker)
        except BaseException:  # an interrupt too must leave no process behind
            self.close()
            raise

    def score(self, request: RewardRequest) -> RewardAnswer:
        """One call of the file. RewardError as from `RewardPlugin.score`; WorkerDied if another try may do better."""
        worker = self._idle.get()
        try:
            if not worker.process.is_alive():
                worker = self._replace(worker)
            worker.pipe.send(request)
            answer = worker.pipe.recv()
        except (EOFError, OSError) as error:
            worker.process.join(END_S)
            code = worker.process.exitcode
            raise WorkerDied(
                f"a worker ended with exit code {code} while scoring {name_samples(request.ids)}"
            ) from error
        finally:
            self._idle.put(worker)  # a dead one is replaced by whoever takes it
        if isinstance(answer, RewardError):
            raise answer
        return answer

    def close(self) -> None:
        """Ends the processes: those without work by closing their pipes, the others by a signal."""
        self._closing = True
        while not self._idle.empty():
            self._idle.get().pipe.close()
        for worker in self._all:
            if not worker.pipe.closed:
                worker.process.terminate()
        for worker in self._all:
            worker.process.join(END_S)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()

    def _replace(self, dead: Worker) -> Worker:
        dead.pipe.close()
        if self._closing:
            raise WorkerDied("the server ends")
        worker = start(self.path)
        self._all.append(worker)
        self.num_restarts += 1
        try:
            worker.wait_loaded()
        except ValueError as error:
            self.failure = str(error)
            self.on_failure()
            raise WorkerDied(self.failure) from error
        return worker


def start(path: str) -> Worker:
    """A process that begins to load the file."""
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=work, args=(path, theirs), name="speechrl-reward-worker")
    process.start()
    theirs.close()  # or our end would never see that the process has ended
    return Worker(process, ours)


def work(path: str, pipe: Connection) -> None:
    """A worker's life: loads the file and says "" or why not, then answers requests until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the server decides
    try:
        plugin = RewardPlugin.load(path, "FILE")  # as `speechrl serve-reward` calls it
    except ValueError as error:
        pipe.send(str(error))
        return
    pipe.send("")
    while True:
        try:
            request = pipe.recv()
        except EOFError:
            return
        try:
            answer: RewardAnswer | RewardError = plugin.score(request)
        except RewardError as error:
            answer = RewardError(str(error))  # without its cause, which may not be picklable
        try:
            pipe.send(answer)
        except OSError:  # the server is gone
            return
