"""How a frozen pydantic model becomes a command line and a YAML file. Knows no option; those are in config.py.

tyro only reads strings into types here. Ranges are checked once, on the whole tree, so that each message has the full
flag and all faults are told together.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import tyro
import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructFieldSpec, StructTypeInfo

from speechrl.disk import write_lines


class Section(BaseModel):
    """A frozen group of options that refuses unknown keys. The string below a field is its help."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        protected_namespaces=(),
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """pydantic takes true for 1: of YAML that is a slip, and a learning rate of 1 a lost run."""
        items = value if isinstance(value, list | tuple) else (value,)
        annotation = cls.model_fields[str(info.field_name)].annotation
        if bool not in (annotation, *get_args(annotation)) and any(isinstance(item, bool) for item in items):
            raise PydanticCustomError("truth", "Input should be no truth value")
        return value


C = TypeVar("C", bound=Section)


def parse(cls: type[C], argv: Sequence[str], prog: str, check: Callable[[C], None]) -> C:
    """A config that `check` accepts. Exits with the message (code 2) when a flag, YAML key or value is wrong."""
    argv = list(argv)
    try:
        path = _take_config_flag(argv)
        default = tyro.MISSING_NONPROP if path is None else _from_yaml(cls, path, f"--config {path}", partial=True)
        unchecked = tyro.cli(
            cls,
            prog=prog,
            args=argv,
            default=default,
            description=f"{cls.__doc__}\n--config FILE reads options from a YAML file first; flags win over it.",
            use_underscores=True,
            registry=_REGISTRY,
        )
        config = _validate(cls, unchecked.model_dump(warnings=False))
        check(config)
    except ValueError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    return config


def load(cls: type[C], path: str | Path) -> C:
    """The config that `dump` wrote. Raises ValueError with file and key when it does not fit."""
    return _from_yaml(cls, str(path), str(path), partial=False)


def dump(config: Section, path: str | Path) -> None:
    """Write the resolved config as YAML, in one move; `load` gives it back equal."""
    text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    write_lines(path, [text.removesuffix("\n")])


def differences(before: dict[str, Any], after: dict[str, Any], prefix: str = "--") -> list[str]:
    """What differs between two dumps of a config, as "--flag was 1, is 2"; an option that one lacks is None there."""
    found = []
    for key in sorted(before.keys() | after.keys()):
        one, two = before.get(key), after.get(key)
        if isinstance(one, dict) and isinstance(two, dict):
            found += differences(one, two, f"{prefix}{key}.")
        elif one != two:
            found.append(f"{prefix}{key} was {one}, is {two}")
    return found


def read_yaml(path: str, origin: str) -> dict[str, Any]:
    """The mapping in a YAML file. Raises ValueError, starting with `origin`."""
    try:
        loaded = yaml.load(Path(path).read_text(encoding="utf-8"), _UniqueKeys) or {}
    except OSError as error:
        raise ValueError(f"{origin}: {(error.strerror or str(error)).lower()}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{origin}: not valid YAML: {error}") from None
    except RecursionError:
        raise ValueError(f"{origin}: not valid YAML: nested too deeply") from None
    if not isinstance(loaded, dict):
        raise ValueError(f"{origin}: expected a mapping of sections, got {type(loaded).__name__}")
    return loaded


class _UniqueKeys(yaml.SafeLoader):
    """YAML, but a key given twice is an error: PyYAML would let the last one win without a word. So is a key that is
    a list or a mapping, and an anchor inside itself.

    And only true and false are booleans, as in YAML 1.2: a key `on` and the language `no` are words. Fields that are
    boolean still take yes, no, on and off.
    """

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        node = super().compose_node(parent, index)
        if isinstance(event, yaml.AliasEvent) and isinstance(node, yaml.CollectionNode) and node.end_mark is None:
            what = f"found the anchor {event.anchor!r} inside itself"
            raise yaml.composer.ComposerError(None, None, what, node.start_mark)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                kind = "list" if isinstance(key, yaml.SequenceNode) else "mapping"
                raise yaml.constructor.ConstructorError(None, None, f"a key is a word, not a {kind}", key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value} is given twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_UniqueKeys.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in forms if tag != "tag:yaml.org,2002:bool" or first in "tTfF"]
    for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


_REGISTRY = ConstructorRegistry()


@_REGISTRY.struct_rule
def _without_validation(info: StructTypeInfo) -> StructConstructorSpec | None:
    """tyro's rule for sections: as its own for pydantic models, but it leaves validation to `parse`."""
    section = info.type
    if not (isinstance(section, type) and issubclass(section, Section)):
        return None

    def construct(**values: Any) -> Section:
        return section.model_construct(**values)

    construct.__doc__ = section.__doc__  # the heading of the section in --help
    hints = get_type_hints(section, include_extras=True)
    fields = []
    for name, field in section.model_fields.items():
        own = tyro.MISSING_NONPROP if field.is_required() else field.default
        default = getattr(info.default, name, own)
        fields.append(StructFieldSpec(name, hints[name], default, helptext=field.description))
    return StructConstructorSpec(construct, tuple(fields))


def _take_config_flag(argv: list[str]) -> str | None:
    """Removes --config PATH from argv and returns PATH."""
    given = [index for index, argument in enumerate(argv) if argument.partition("=")[0] == "--config"]
    if len(given) > 1:
        raise ValueError("--config is given twice; put everything into one YAML file, flags win over it")
    if not given:
        return None
    (index,) = given
    _, separator, path = argv.pop(index).partition("=")
    if not separator:
        path = argv.pop(index) if index < len(argv) else ""
    if not path or path.startswith("--"):
        raise ValueError("--config needs the path of a YAML file")
    return path


def _from_yaml(cls: type[C], path: str, origin: str, *, partial: bool) -> C:
    """partial: required options may be missing, flags will give them."""
    loaded = read_yaml(path, origin)
    _check_keys(cls, loaded, origin, prefix="")
    sections = {name: field.default for name, field in cls.model_fields.items() if isinstance(field.default, Section)}
    values = _over({name: section.model_dump() for name, section in sections.items()}, loaded)
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        if partial and all(problem["type"] == "missing" for problem in error.errors()):
            return cls.model_construct(**values)
        raise ValueError(f"{origin}: {_explain(error)}") from None


def _over(defaults: dict[str, Any], loaded: dict[str, Any]) -> dict[str, Any]:
    """`loaded` over `defaults`, section by section: a config may give a section other defaults than its class has."""
    merged = dict(defaults)
    for key, value in loaded.items():
        own = merged.get(key, {})
        # a mapping in the place of a value is told by pydantic, with its flag
        merged[key] = _over(own, value) if isinstance(value, dict) and isinstance(own, dict) else value
    return merged


def _check_keys(cls: type[Section], loaded: dict, origin: str, prefix: str) -> None:
    for key, value in loaded.items():
        if key not in cls.model_fields:
            near = difflib.get_close_matches(str(key), list(cls.model_fields), n=1)
            hint = f"; did you mean {prefix}{near[0]}?" if near else f"; allowed: {', '.join(cls.model_fields)}"
            raise ValueError(f"{origin}: unknown key {prefix}{key}{hint}")
        section = cls.model_fields[key].annotation
        if isinstance(section, type) and issubclass(section, Section):
            if not isinstance(value, dict):
                raise ValueError(f"{origin}: {prefix}{key} is a section, got {value!r}")
            _check_keys(section, value, origin, f"{prefix}{key}.")


def _validate(cls: type[C], values: dict[str, Any]) -> C:
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        raise ValueError(_explain(error)) from None


def _explain(error: ValidationError) -> str:
    """ "--actor.adam.lr: Input should be greater than 0, got -1.0", one after the other."""
    lines = []
    for problem in error.errors(include_url=False):
        # numbers in the place are positions in a list, which has one flag
        flag = "--" + ".".join(part for part in problem["loc"] if isinstance(part, str))
        got = "" if problem["type"] == "missing" else f", got {problem['input']!r}"
        lines.append(f"{flag}: {problem['msg']}{got}")
    return "; ".join(lines)


def named_paths(entries: Sequence[str], flag: str) -> dict[str, str]:
    """{"name": path} of entries "name=path" or "path" (named by its stem). Raises ValueError on a name given twice."""
    named: dict[str, str] = {}
    for entry in entries:
        name, separator, path = entry.partition("=")
        if not separator:
            name, path = Path(entry).stem, entry
        if not re.fullmatch(r"(?!\.+$)[^/\\\s]+", name):
            raise ValueError(f"{flag} {entry}: {name!r} is no name (it names files and metrics); write name=path")
        if name in named:
            raise ValueError(f"{flag}: the name {name!r} stands for both {named[name]} and {path}; write name=path")
        named[name] = path
    return named


def named_lists(entries: Sequence[str], flag: str) -> dict[str, tuple[str, ...]]:
    """{"name": values} of entries "name=value"; {"": values} if none has a name. A comma separates values of one entry.

    Raises ValueError when only some entries have a name.
    """
    found: dict[str, list[str]] = {}
    for entry in entries:
        given = re.fullmatch(r"([\w-]+)=(.*)", entry.strip())
        name, values = given.groups() if given else ("", entry)
        found.setdefault(name, []).extend(value.strip() for value in values.split(","))
    if "" in found and len(found) > 1:
        raise ValueError(
            f"{flag} {found[''][0]} has no name, others have; write name=value for all of them or for none"
        )
    return {name: tuple(values) for name, values in found.items()}


def named_numbers(entries: Sequence[str], flag: str) -> dict[str, float]:
    """{"name": number} of entries "name=number". Raises ValueError on anything else, and on a name given twice."""
    named: dict[str, float] = {}
    for entry in entries:
        name, _, text = entry.partition("=")
        try:
            number = float(text)
        except ValueError:
            raise ValueError(f"{flag} {entry}: write name=number") from None
        if not name or name in named:
            raise ValueError(f"{flag} {entry}: {f'{name} is given twice' if name else 'write name=number'}")
        named[name] = number
    return named


def read_secret(variable: str, flag: str) -> str:
    """The token in the environment variable that a flag names; "" if it names none.

    Raises ValueError when the variable is empty or holds what can't stand in an HTTP header.
    """
    if not variable:
        return ""
    value = os.environ.get(variable, "")
    if not re.fullmatch(r"[!-~]+", value):
        what = "holds spaces or unprintable characters" if value else "is not set"
        raise ValueError(f"{flag} {variable}: the environment variable of this name {what}; export a token in it")
    return value
