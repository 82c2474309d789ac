"""hypotheses.jsonl: one transcript a line, with all that its metrics need; several lines of one id are its samples."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from speechrl.data.languages import language_code
from speechrl.data.manifest import read_rows
from speechrl.data.normalise import TextRules
from speechrl.disk import write_lines
from speechrl.evaluation.metrics import Decoded, Samples
from speechrl.types import FinishReason, Group, Scores, Utterance

HYPOTHESES = "hypotheses.jsonl"


class Line(BaseModel):
    """A line of the file. `id`, `text` (what was said) and `reference` are required; other keys are left alone.

    language: of the utterance; said_language: what the model said it heard; raw_text: with the model's tags;
    text_rules: where not the defaults of the language compared the texts. readable: False where `text` is no transcript
    of speech that was generated; parts: of the reward. All else as in a manifest.
    """

    model_config = ConfigDict(frozen=True, allow_inf_nan=False, ser_json_bytes="base64")

    id: str
    text: str
    reference: str
    language: str | None = None
    said_language: str | None = None
    finish_reason: FinishReason | None = None
    reward: float | None = None
    keywords: tuple[str, ...] = ()
    duration_s: float | None = None
    metadata: dict[str, Any] = {}
    raw_text: str | None = None
    text_rules: TextRules | None = None
    readable: bool = True
    parts: dict[str, float | None] = {}


def decoded(group: Group, scores: Scores | None, book: Mapping[str, TextRules]) -> Samples:
    """The transcripts of a group. Of speech the text is what the reward heard, and there is none without.

    book: {language code: rules} of --eval.text_rules.
    """
    rules, samples = book.get(language_code(group.utterance.language or "")), []
    for index, rollout in enumerate(group.rollouts):
        heard = scores.heard[index] if scores is not None and scores.heard else None
        samples.append(
            Decoded(
                group.utterance,
                rollout.text if heard is None else heard,
                rollout.language,
                rollout.finish_reason,
                scores.rewards[index] if scores is not None else None,
                rollout.raw_text,
                rules,
                readable=rollout.codes is None or heard is not None,
                parts={name: values[index] for name, values in scores.parts.items()} if scores is not None else {},
            )
        )
    return tuple(samples)


def write_hypotheses(path: Path, groups: Sequence[Samples]) -> None:
    """Utterance after utterance in the set's order, sample after sample, in one move."""
    # a `datasets` folder may hold what JSON has not; that must not cost the transcripts
    write_lines(path, (_line(item).model_dump_json(fallback=repr) for samples in groups for item in samples))


def _line(item: Decoded) -> Line:
    utterance = item.utterance
    return Line(
        id=utterance.id,
        text=item.text,
        reference=utterance.text,
        language=utterance.language,
        said_language=item.language,
        finish_reason=item.finish_reason,
        reward=item.reward,
        keywords=utterance.keywords,
        duration_s=utterance.duration_s,
        metadata=dict(utterance.metadata),
        raw_text=item.raw_text,
        text_rules=item.text_rules,
        readable=item.readable,
        parts=dict(item.parts),
    )


def read_hypotheses(path: Path) -> list[Samples]:
    """The samples of every utterance, in the order of their first lines.

    Raises ValueError naming file:line for a line that is no hypothesis or gives its id another reference than before,
    and for a file without any.
    """
    found: dict[str, list[Decoded]] = {}
    for where, _, row in read_rows(path):
        if isinstance(row.get("id"), int) and not isinstance(row["id"], bool):
            row["id"] = str(row["id"])  # as manifests allow
        try:
            line = Line.model_validate_json(json.dumps(row))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            key = ".".join(map(str, first["loc"]))
            raise ValueError(f"{where}: no hypothesis: {f'`{key}`: ' if key else ''}{first['msg']}") from None
        item = _decoded(line, where)
        samples = found.setdefault(line.id, [])
        if samples and samples[0].utterance.text != line.reference:
            raise ValueError(f"{where}: id {line.id!r} had another reference at {samples[0].utterance.where}")
        samples.append(item)
    if not found:
        raise ValueError(f"{path}: holds no hypotheses")
    return [tuple(samples) for samples in found.values()]


def _decoded(line: Line, where: str) -> Decoded:
    utterance = Utterance(
        id=line.id,
        text=line.reference,
        language=line.language,
        keywords=line.keywords,
        duration_s=line.duration_s,
        metadata=line.metadata,
        where=where,
    )
    return Decoded(
        utterance,
        line.text,
        line.said_language,
        line.finish_reason,
        line.reward,
        line.raw_text,
        line.text_rules,
        line.readable,
        line.parts,
    )
