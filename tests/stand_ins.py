"""Stand-ins for ranks and engines: actors that start quickly, because this file imports little."""

from __future__ import annotations

import os
import sys
import time

import ray

from speechrl.rollout.engine import Completion, EngineInput, Sampled, Share
from speechrl.types import Group, Prompt, Rollout, Utterance


@ray.remote
class Diary:
    """What happened in which order, over all stand-ins."""

    def __init__(self):
        self.lines = []

    def write(self, line):
        self.lines.append(line)

    def count(self):
        return len(self.lines)

    def take(self):
        lines, self.lines = self.lines, []
        return lines


class Rank:
    """A policy rank that knows where its prompts come from."""

    def __init__(self, number: int, diary):
        self.number, self.diary, self.version = number, diary, 7

    def note(self, line):
        ray.get(self.diary.write.remote(line))

    def engine_inputs(self, utterances, same_gpu=False):
        where = "on its GPU" if same_gpu else ""
        return Share([EngineInput(Prompt(item, (self.number,), where)) for item in utterances], None, 0.5 + self.number)

    def groups_of(self, sampled, version):
        return [
            Group(prompt, tuple(Rollout(c.token_ids, c.logprobs, c.finish_reason, version, "", "") for c in items))
            for prompt, items in sampled
        ]

    def send_weights(self, servers, trained_only, options, transfer):
        ray.get([server.load_bucket.remote((trained_only, transfer)) for server in servers])
        return self.version, 2**20

    def get_weights_version(self):
        return self.version

    def step(self):
        self.version += 1

    def look_ahead(self, utterances):
        self.note(f"look ahead {[item.id for item in utterances]}")

    def offload(self):
        self.note("offload")

    def reload(self):
        self.note("reload")


class DecodingRank(Rank):
    """A rank that says when it decodes."""

    def groups_of(self, sampled, version):
        self.note("decodes")
        return super().groups_of(sampled, version)


class MeetingRank(DecodingRank):
    """A rank that decodes only while another one has a piece, too."""

    def groups_of(self, sampled, version):
        groups = super().groups_of(sampled, version)
        started = time.monotonic()
        while ray.get(self.diary.count.remote()) < 2:
            if time.monotonic() - started > 20:
                raise TimeoutError("nothing else is decoded meanwhile")
            time.sleep(0.02)
        return groups


class Server:
    """An engine that answers with its own number; `fault` is what goes wrong."""

    def __init__(self, number: int, diary, fault: str = ""):
        self.number, self.diary, self.fault, self.version = number, diary, fault, -1

    def note(self, line):
        ray.get(self.diary.write.remote(line))

    def stream(self, sampling, *shares):
        if self.fault == "dies":
            print("no memory left, says the stand-in", file=sys.stderr, flush=True)
            os._exit(1)
        answer = [
            (item.prompt, [Completion((self.number, int(item.prompt.utterance.id)), (0.0, 0.0), "stop")])
            for share in shares
            for item in share.inputs
        ]
        version = 5 if self.fault == "is stale" else self.version
        encode_s = tuple(share.encode_s for share in shares)
        for place in reversed(range(len(answer))):  # the last prompt is done first
            yield Sampled([place], [answer[place]], version, encode_s, 2.0 - self.number % 10)
            if self.fault == "dies half-way":
                time.sleep(2)  # the piece is on its way
                os._exit(1)

    def log_path(self):
        return os.path.realpath("/proc/self/fd/2")

    def start_update(self):
        if self.fault == "refuses":
            raise ValueError("no such weight: model.x")
        if self.fault == "hangs":
            time.sleep(60)
        self.note("start")

    def load_bucket(self, bucket):
        if self.fault == "dies in a sync":
            os._exit(1)
        self.note(f"load {bucket}")

    def finish_update(self, version):
        self.version = version
        self.note("finish")

    def sleep(self):
        if self.fault == "dies in its sleep":
            os._exit(1)
        self.note("sleep")

    def wake(self, what):
        self.note(f"wake {what}")


class Lodger:
    """Knows which GPUs Ray gave it, and nothing of what it was told."""

    def __init__(self, *arguments):
        pass

    def gpus(self):
        return ray.get_gpu_ids()


class WaitingServer(Server):
    """An engine that sends its second piece once the first is being decoded."""

    def stream(self, sampling, *shares):
        for index, piece in enumerate(super().stream(sampling, *shares)):
            started = time.monotonic()
            while index and ray.get(self.diary.count.remote()) < index:
                if time.monotonic() - started > 20:
                    raise TimeoutError("no rank decodes what was sent")
                time.sleep(0.02)
            yield piece


def audio_input(name: str, ids: tuple[int, ...], num_rows: int) -> EngineInput:
    return EngineInput(Prompt(Utterance(id=name, text="", where="a.jsonl:3"), ids, ""), 9, num_rows)
