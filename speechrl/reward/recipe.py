"""A reward written in YAML: named parts, each a metric with a shape, a weight and maybe a gate.

    parts:
      cer: {metric: cer, shape: one_minus, weight: 0.7}
      keywords: {metric: keyword_f1, weight: 0.2, gate: {on: language, at_least: 0.5}}
      language: {metric: language_consistency, weight: 0.1}

builds what a Python file would build with `speechrl.reward.compose`, so it goes wherever a reward file goes.
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, ValidationError

from speechrl.data.normalise import TextRules
from speechrl.data.text_rules import read_rules
from speechrl.reward.compose import SHAPES, Column, gate, weighted_sum
from speechrl.reward.table import METRICS, Sample, samples_of
from speechrl.settings import Section, read_yaml

SUFFIXES = (".yaml", ".yml")
TRIED = Sample("", "", duration_s=1.0)  # metrics with options are tried on it when a file is read
Place = tuple[str | int, ...]  # keys from the top of the file to a value


class Gate(Section):
    """The part counts only where another part passes; elsewhere it is 0."""

    on: str
    """Another part, taken before its own gate."""
    at_least: float
    """It passes from here on."""


class Part(Section):
    """One part of a reward: metric -> shape -> gate, and its weight in the sum."""

    metric: str
    """A name of `speechrl.reward.table.METRICS`."""
    weight: float = Field(ge=0)
    """Relative to the other parts; 0 keeps the part for gates and logs."""
    shape: str = ""
    """A name of `speechrl.reward.compose.SHAPES`; the metric as it is if empty."""
    gate: Gate | None = None
    args: dict[str, Any] = Field(default_factory=dict)
    """Options of the metric."""
    shape_args: dict[str, Any] = Field(default_factory=dict)
    """Options of the shape, such as {a: 2}."""


class Recipe(Section):
    """The whole file."""

    parts: Annotated[dict[str, Part], Field(min_length=1)]
    rules: dict[str, dict[str, str]] = Field(default_factory=dict)
    """How texts are compared: language -> options of `speechrl.data.normalise.TextRules`."""

    def book(self) -> dict[str, TextRules]:
        """The rules by language code. Raises RecipeError."""
        found: dict[str, TextRules] = {}
        for language, options in self.rules.items():
            for option, value in options.items():
                try:
                    found |= read_rules([f"{language}.{option}={value}"], "rules", found)
                except ValueError as error:
                    raise RecipeError(("rules", language, option), str(error)) from None
        return found


def read_recipe(path: str | Path, flag: str) -> Callable[..., dict[str, Any]]:
    """The reward_func that a YAML file describes. ValueError names the flag, file:line, the key and what is allowed."""
    origin = f"{flag}: {path}"
    raw = read_yaml(str(path), origin)
    lines = _lines(yaml.compose(Path(path).read_text(encoding="utf-8"), yaml.SafeLoader))
    try:
        recipe = Recipe.model_validate(raw)
        _check(recipe)
    except ValidationError as error:
        # a misspelt key is told before the right one is missed
        problem = min(error.errors(include_url=False), key=lambda one: one["type"] != "extra_forbidden")
        place: Place = problem["loc"]
        message = _explain(place, problem)
    except RecipeError as error:
        place, message = error.place, error.message
    else:
        return _reward_func(recipe)
    # a key that is missing has no line: that of the mapping it belongs to
    line = next(lines[place[:length]] for length in range(len(place), -1, -1) if place[:length] in lines)
    raise ValueError(f"{origin}:{line}: {'.'.join(map(str, place)) or 'the file'}: {message}")


class RecipeError(ValueError):
    """A value that has the right type and no meaning. place: its keys in the file."""

    def __init__(self, place: Place, message: str):
        super().__init__(message)
        self.place, self.message = place, message


def _reward_func(recipe: Recipe) -> Callable[..., dict[str, Any]]:
    weights = {name: part.weight for name, part in recipe.parts.items()}
    book = recipe.book()

    def reward_func(
        queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str], **columns: Sequence[Any]
    ) -> dict[str, Any]:
        samples = samples_of({**columns, "labels": labels}, book)
        measured = {name: _measure(name, part, samples) for name, part in recipe.parts.items()}
        shaped = {name: _shape(name, part, measured[name]) for name, part in recipe.parts.items()}
        parts = {
            name: gate(shaped[name], shaped[part.gate.on], part.gate.at_least) if part.gate else shaped[name]
            for name, part in recipe.parts.items()
        }
        logs = {f"{name}_unshaped": measured[name] for name, part in recipe.parts.items() if part.shape}
        return {"rewards": weighted_sum(parts, weights), "parts": parts, "weights": weights, "extra_logs": logs}

    return reward_func


def _measure(name: str, part: Part, samples: Sequence[Sample]) -> Column:
    try:
        return [METRICS[part.metric].function(sample, **part.args) for sample in samples]
    except ValueError as error:
        raise ValueError(f"part {name!r} (metric {part.metric}): {error}") from error


def _shape(name: str, part: Part, values: Column) -> Column:
    try:
        return SHAPES[part.shape].function(values, **part.shape_args) if part.shape else values
    except ValueError as error:
        raise ValueError(f"part {name!r} (metric {part.metric}, shape {part.shape}): {error}") from error


# --- checks: everything that can be wrong is told when the file is read ---------------------------------------------


def _check(recipe: Recipe) -> None:
    """Raises RecipeError at the first value that means nothing."""
    recipe.book()
    for name, part in recipe.parts.items():
        place: Place = ("parts", name)
        if not name:
            raise RecipeError(place, "a part needs a name")
        _one_of(part.metric, METRICS, (*place, "metric"))
        metric = METRICS[part.metric]
        _check_args(metric.function, part.args, (*place, "args"))
        try:
            if part.args:
                metric.function(TRIED, **part.args)
        except ValueError as error:
            raise RecipeError((*place, "args"), str(error)) from error
        if part.shape:
            _one_of(part.shape, SHAPES, (*place, "shape"))
            _check_args(SHAPES[part.shape].function, part.shape_args, (*place, "shape_args"))
            try:
                SHAPES[part.shape].function([], **part.shape_args)
            except ValueError as error:
                raise RecipeError((*place, "shape_args"), str(error)) from error
        elif part.shape_args:
            raise RecipeError((*place, "shape_args"), f"there is no shape; allowed: {', '.join(SHAPES)}")
        falls = bool(part.shape) and SHAPES[part.shape].falls
        if falls != metric.less_is_better:
            right = ", ".join(shape for shape in SHAPES if SHAPES[shape].falls == metric.less_is_better)
            better = "less" if metric.less_is_better else "more"
            raise RecipeError(
                (*place, "shape"),
                f"with {part.metric} {better} is better, and {part.shape or 'no shape'} rewards the opposite; allowed: "
                f"{right}{'' if metric.less_is_better else ', or no shape'}",
            )
        if part.gate is not None:
            _one_of(part.gate.on, [other for other in recipe.parts if other != name], (*place, "gate", "on"))
    if not any(part.weight for part in recipe.parts.values()):
        raise RecipeError(("parts",), "all weights are 0, so there would be no reward")


def _one_of(name: str, allowed: Collection[str], place: Place) -> None:
    if name not in allowed:
        raise RecipeError(place, _not_among(name, allowed))


def _not_among(name: str, allowed: Collection[str]) -> str:
    near = difflib.get_close_matches(name, list(allowed), n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"there is no {name!r} (allowed: {', '.join(allowed) or 'none'}){hint}"


def _check_args(function: Callable[..., Any], args: Mapping[str, Any], place: Place) -> None:
    """Options are keyword-only parameters. A value has the type of its default; without a default it is needed."""
    parameters = inspect.signature(function).parameters.values()
    defaults = {item.name: item.default for item in parameters if item.kind is inspect.Parameter.KEYWORD_ONLY}
    for name, value in args.items():
        _one_of(name, defaults, (*place, name))
        default = defaults[name]
        if default is inspect.Parameter.empty:
            if not (isinstance(value, list) and value and all(isinstance(text, str) for text in value)):
                raise RecipeError((*place, name), f"it is a list of texts, got {value!r}")
            continue
        wanted = (int, float) if isinstance(default, float) else type(default)
        if not isinstance(value, wanted) or isinstance(value, bool) != isinstance(default, bool):
            raise RecipeError((*place, name), f"it is like its default, {default!r}, got {value!r}")
        if isinstance(value, float) and not math.isfinite(value):
            raise RecipeError((*place, name), f"it is a finite number, got {value!r}")
    for name, default in defaults.items():
        if default is inspect.Parameter.empty and name not in args:
            raise RecipeError((*place, name), "it is missing")


def _explain(place: Place, problem: Mapping[str, Any]) -> str:
    if problem["type"] == "missing":
        return "it is missing"
    if problem["type"] != "extra_forbidden":
        return f"{problem['msg']}, got {problem['input']!r}"
    models: dict[int, type[Section]] = {1: Recipe, 3: Part, 4: Gate}  # by depth: parts, parts.NAME.KEY, ....gate.KEY
    return _not_among(str(place[-1]), models[len(place)].model_fields)


def _lines(node: yaml.Node | None, place: Place = ()) -> dict[Place, int]:
    """{keys to a value: line where its key stands}, from 1."""
    if node is None:
        return {(): 1}
    lines = {place: node.start_mark.line + 1}
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            here = (*place, key.value)
            lines |= _lines(value, here) | {here: key.start_mark.line + 1}
    return lines
