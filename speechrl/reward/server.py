"""Serves a reward file over HTTP, with OpenRLHF's JSON keys and ours beside them."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, model_validator

from speechrl.reward.plugin import RewardAnswer, RewardError, RewardPlugin, RewardRequest
from speechrl.types import FinishReason


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

    @model_validator(mode="after")
    def _equal_lengths(self) -> RewardCall:
        for name, values in self:
            if values is not None and len(values) != len(self.query):
                raise ValueError(f"{name} has length {len(values)}, but query has {len(self.query)}")
        return self

    def to_request(self) -> RewardRequest:
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
        )


class RewardReply(BaseModel):
    """Answer of POST /get_reward. null abstains; `scores` is null and `weights` empty unless the file returns them."""

    rewards: list[float | None]
    scores: list[float | None] | None = None
    extra_logs: dict[str, float] = {}
    parts: dict[str, list[float | None]] = {}
    weights: dict[str, float] = {}


def _or(given: list | None, default: list) -> list:
    return default if given is None else given


def make_app(plugin_path: str | Path) -> FastAPI:
    """POST /get_reward, GET /health, GET /schema for one reward file, which is loaded here.

    Malformed requests get 422 with the key at fault. An error of the plugin gets 500 with "retry": false: it would come
    back, so clients of ours don't try again.
    """
    plugin = RewardPlugin.load(plugin_path)
    # One call at a time, as in process: a reward file may hold a model, and need not know about threads.
    one_at_a_time = threading.Lock()
    app = FastAPI(title=f"speechrl reward {plugin.path.name}")

    @app.post("/get_reward")
    def get_reward(call: RewardCall) -> RewardReply:
        if not call.query:
            return RewardReply(rewards=[])
        with one_at_a_time:
            answer: RewardAnswer = plugin.score(call.to_request())
        return RewardReply(**vars(answer))

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok", "plugin": str(plugin.path)}

    @app.get("/schema")
    async def schema() -> dict[str, Any]:
        return {"request": RewardCall.model_json_schema(), "answer": RewardReply.model_json_schema()}

    @app.exception_handler(RewardError)
    async def plugin_failed(_: Request, error: RewardError) -> JSONResponse:
        return JSONResponse({"error": str(error), "retry": False}, status_code=500)

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> JSONResponse:
        faults = [": ".join([*map(str, fault["loc"][1:]), fault["msg"]]) for fault in error.errors()]
        return JSONResponse({"error": "; ".join(faults), "retry": False}, status_code=422)

    return app


def serve(plugin_path: str | Path, host: str = "127.0.0.1", port: int = 5000) -> None:
    """Serves until interrupted. ValueError if the file doesn't load."""
    app = make_app(plugin_path)
    try:
        with socket.create_server((host, port), reuse_port=False):
            pass
    except OSError as error:
        raise ValueError(f"--host {host} --port {port}: can't listen there ({error.strerror}); take another") from error
    uvicorn.run(app, host=host, port=port, log_level="info")
