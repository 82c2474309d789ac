"""How a reward function wants to be called, told by the names of its parameters.

lists of a request, by field name -> (positional, keyword) arguments. Nothing is called here.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

Lists = Mapping[str, list]
Arguments = tuple[list[Any], dict[str, Any]]


@dataclass(frozen=True)
class RewardFunction:
    """One function of a reward file; `arguments` makes what it is called with out of a request's lists.

    weight: of `reward_funcs`, as in TRL; None for the one `reward_func` of a file, whose answer is the reward.
    """

    name: str
    function: Callable[..., Any]
    arguments: Callable[[Lists], Arguments]
    weight: float | None = None


def find_functions(module: ModuleType, keywords: Sequence[str]) -> list[RewardFunction]:
    """`reward_func` of a file, or all of its `reward_funcs`. keywords: what OpenRLHF's signature may add by name.

    ValueError says what is missing, and can follow the file's name and a colon.
    """
    function, functions = getattr(module, "reward_func", None), getattr(module, "reward_funcs", None)
    if functions is None:
        return [reward_function("reward_func", function, keywords)]
    if not isinstance(functions, list | tuple) or not functions:
        raise ValueError(f"reward_funcs must be a list of functions, but is {functions!r}")
    if function is not None and function not in functions:
        raise ValueError("it defines reward_func and a list reward_funcs without it; keep one of them")
    names = [getattr(each, "__name__", None) or type(each).__name__ for each in functions]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"reward_funcs holds several functions named {twice[0]}; parts need names of their own")
    weights = _weights(getattr(module, "reward_weights", None), len(functions))
    return [
        reward_function(name, each, keywords, weight)
        for name, each, weight in zip(names, functions, weights, strict=True)
    ]


def _weights(given: Any, count: int) -> list[float]:
    """As TRL: 1 for each unless the file says otherwise. Any finite number; below 0 is a penalty."""
    if given is None:
        return [1.0] * count
    given = given if isinstance(given, list | tuple) else [given]
    numbers = [weight for weight in given if isinstance(weight, int | float) and math.isfinite(weight)]
    if len(numbers) != len(given) or len(given) != count:
        raise ValueError(f"reward_weights is {given!r}; give one number for each of the {count} reward_funcs")
    return [float(weight) for weight in numbers]


def reward_function(name: str, function: Any, keywords: Sequence[str], weight: float | None = None) -> RewardFunction:
    """Tells the kind of a function by its parameters. weight: of one among several. ValueError as `find_functions`."""
    if not callable(function) or inspect.iscoroutinefunction(function):
        raise ValueError(
            "it must define an ordinary function reward_func(queries, prompts, labels), reward_func(completions, "
            f"**kwargs) as in TRL, or a list reward_funcs of such; {name} is "
            f"{'missing' if function is None else repr(function)}"
        )
    signature = inspect.signature(function)
    kind = "trl" if "completions" in signature.parameters and "queries" not in signature.parameters else "openrlhf"
    if weight is not None and kind != "trl":
        raise ValueError(f"reward_funcs are called as in TRL, so {name}{signature} needs a parameter `completions`")
    return RewardFunction(name, function, SIGNATURES[kind](name, signature, keywords), weight)


# --- OpenRLHF: three by position, and by keyword what the function takes ----------------------------------------------


def _openrlhf(name: str, signature: inspect.Signature, keywords: Sequence[str]) -> Callable[[Lists], Arguments]:
    by_position, others = list(signature.parameters)[:3], list(signature.parameters)[3:]
    takes_all = _takes_all(signature)
    taken = tuple(key for key in keywords if key not in by_position and (takes_all or key in others))
    try:
        signature.bind(None, None, None, **dict.fromkeys(taken))
    except TypeError as error:
        raise ValueError(
            f"{name}{signature} can't be called as {name}(queries, prompts, labels), with the keywords "
            f"{tuple(keywords)} if it takes them: {error}"
        ) from error
    return partial(_openrlhf_arguments, taken)


def _openrlhf_arguments(taken: Sequence[str], lists: Lists) -> Arguments:
    return [lists["queries"], lists["prompts"], lists["labels"]], {key: lists[key] for key in taken}


# --- TRL: all by keyword, the manifest's columns among them -----------------------------------------------------------


def _trl(name: str, signature: inspect.Signature, keywords: Sequence[str]) -> Callable[[Lists], Arguments]:
    return partial(_trl_arguments, name, signature)


def _trl_arguments(name: str, signature: inspect.Signature, lists: Lists) -> Arguments:
    """ValueError for a parameter that is no column of this request."""
    columns = trl_columns(lists)
    required = [key for key, parameter in signature.parameters.items() if _is_required(parameter)]
    missing = [key for key in required if key not in columns]
    if missing:
        raise ValueError(
            f"{name} takes `{missing[0]}`, which is no column of the manifest here: {', '.join(sorted(columns))}"
        )
    if not _takes_all(signature):
        columns = {key: values for key, values in columns.items() if key in signature.parameters}
    return [], columns


def trl_columns(lists: Lists) -> dict[str, list]:
    """prompts, completions and the manifest's columns under their names there, N long each; None where a row has none.

    `reference` is `text` again, unless the manifest has a column of that name. ValueError for a metadata column
    whose name is taken.
    """
    metadata = lists["metadata"]
    own = {key: [row.get(key) for row in metadata] for key in dict.fromkeys(key for row in metadata for key in row)}
    columns = {
        "prompts": lists["prompts"],
        "completions": lists["responses"],
        "id": lists["ids"],
        "text": lists["labels"],
        "language": lists["languages"],
        "keywords": lists["keywords"],
        "audio": lists["audio_paths"],
        "duration_s": lists["durations_s"],
    }
    if any(lists["generated_audio"]) or any(lists["speaker_paths"]):  # of a model that speaks
        columns |= {"generated_audio": lists["generated_audio"], "speaker_audio": lists["speaker_paths"]}
    taken = sorted(set(own) & set(columns))
    if taken:
        raise ValueError(f"the manifest's column `{taken[0]}` has the name of an argument; rename it there")
    return {"reference": list(lists["labels"])} | own | columns


def trl_sum(parts: Mapping[str, Sequence[float | None]], weights: Mapping[str, float]) -> list[float | None]:
    """sum(weight * part) over the parts that aren't None, as TRL's GRPO. No division by the weights.

    A sample whose parts are all None gets None (TRL: 0, and a warning).
    """
    rows = zip(*parts.values(), strict=True)
    sums = []
    for row in rows:
        terms = [weights[name] * value for name, value in zip(parts, row, strict=True) if value is not None]
        sums.append(sum(terms) if terms else None)
    return sums


def _takes_all(signature: inspect.Signature) -> bool:
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in signature.parameters.values())


def _is_required(parameter: inspect.Parameter) -> bool:
    star = parameter.kind in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return not star and parameter.default is inspect.Parameter.empty


SIGNATURES = {"openrlhf": _openrlhf, "trl": _trl}
