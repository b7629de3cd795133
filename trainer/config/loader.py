"""Builds a `Config` from a preset or a YAML file and the command line's overrides, strictly.

Owns file reading, type conversion and the messages for keys that do not exist. Never guesses: an unknown key, a key given
twice or a value of another type is a ConfigError that names it, with the nearest right name.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import itertools
import json
import logging
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ttp.errors import ConfigError
from ttp.inputs import checked
from ttp.inputs.strict_yaml import load_yaml, read_yaml_file

from .schema import Config
from .static_graph import translate

log = logging.getLogger("ttp.trainer.config")

REFUSED = {
    ("optimizer_config.optimizer_type", "Came"): (
        "its update of an element depends on the element's row, column and whole matrix, so its state cannot be cut into the shards"
        " that two ranks hold; use AdamW, Adam or SGD"
    ),
    ("model_config.encoder_attn_mask_type", "padding"): (
        "training sequences have no padding, and a GPT attends to earlier tokens only; use causal or null"
    ),
}
"""Values of other trainers' configurations that have no counterpart here, with the reason. By (key, value)."""

DEFAULT_CONFIG = "gpt_tiny"
MODEL_SECTION, MODEL_TYPE = "model_config", "gpt_config"
"""The section that describes the model, and its other name: the default of `--model_type`."""


def load_config(
    name: str = DEFAULT_CONFIG, overrides: Sequence[tuple[str, str]] = (), model_type: str = MODEL_TYPE
) -> Config:
    """Return the preset or file `name` with `(dotted key, YAML value)` overrides, the last one winning. What of a MindFormers file has no
    effect is logged. Raises ConfigError.

    `model_type`: the section that is taken for model_config, where the file has it.
    """
    tree = read_yaml(name)
    _take_model_section(tree, model_type)
    tree, notes = _on_preset(*translate(tree))
    for note in notes:
        log.warning("--config %s: %s", name, note)
    for key, text in overrides:
        _override(tree, key, text)
    return typing.cast(Config, _build(Config, tree, ""))


def presets() -> list[str]:
    """Return the names that `--config` takes without a path."""
    folder = resources.files("ttp.trainer") / "presets"
    return sorted(Path(entry.name).stem for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def read_yaml(name: str) -> dict[str, Any]:
    """Return the mapping in the preset or file `name`."""
    preset = name in presets()
    path = str(resources.files("ttp.trainer") / "presets" / f"{name}.yaml") if preset else name
    where = f"--config {checked.shown_path(name)}"
    try:
        tree = read_yaml_file(path, where)
    except FileNotFoundError:
        near = _nearest(name, presets())
        raise ConfigError(f"{where}: no such file, and no such preset{near} ({', '.join(presets())})") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{where}: got {_kind(tree)}, expected sections ({', '.join(_types(Config))})")
    return tree


def _on_preset(tree: dict[str, Any], notes: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Lay a file over the preset that its key `preset` names, if it has one."""
    name = tree.pop("preset", None)
    if name is None:
        return tree, notes
    if name not in presets():
        near = _nearest(str(name), presets())
        raise ConfigError(f"preset: got {checked.shown(name)}, expected one of {', '.join(presets())}{near}")
    base, _ = _on_preset(read_yaml(name), [])
    return _laid_over(base, tree), notes


def _laid_over(base: Mapping[str, Any], tree: Mapping[str, Any]) -> dict[str, Any]:
    both = {key: _laid_over(base[key], value) for key, value in tree.items()
            if isinstance(value, Mapping) and isinstance(base.get(key), Mapping)}  # fmt: skip
    return {**base, **tree, **both}


def parse_overrides(args: Sequence[str]) -> list[tuple[str, str]]:
    """Split `--section.key value` and `--section.key=value` into (section.key, value). Raises ConfigError."""
    overrides: list[tuple[str, str]] = []
    rest = list(args)
    while rest:
        arg = rest.pop(0)
        key, equals, text = arg.removeprefix("--").partition("=")
        if not arg.startswith("--") or not key:
            raise ConfigError(
                f"argument: got {checked.shown(arg)}, expected --section.key value, as in --training_config.training_iters 200"
            )
        if "." not in key:
            near = _nearest(key, ["config", "help", *(path for path, *_ in describe())])
            raise ConfigError(
                f"argument: got {checked.shown(arg)}, expected --config or --section.key{near}; see --help"
            )
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"argument {checked.shown(arg)}: expected a value after it")
            text = rest.pop(0)
        overrides.append((key, text))
    return overrides


def describe() -> Iterator[tuple[str, str, str, str]]:
    """Yield (dotted key, type, default, documentation) of every key, in the order of the sections."""
    yield from _describe(Config, "")


# --- mappings to dataclasses ---


def _take_model_section(tree: dict[str, Any], model_type: str) -> None:
    """Call the section `model_type` of the file model_config. Raises ConfigError when there is none, or both."""
    if model_type == MODEL_SECTION or (model_type == MODEL_TYPE and model_type not in tree):
        return
    if model_type not in tree:
        raise ConfigError(
            f"--model_type: got {checked.shown(model_type)}, expected a section of the configuration file"
            f" ({', '.join(map(str, tree))}). Name the one that describes the model, or leave the option out"
        )
    if MODEL_SECTION in tree:
        raise ConfigError(
            f"{model_type}: got a section of this name and {MODEL_SECTION}, expected one of them. Remove the other, or name"
            f" it: --model_type {MODEL_SECTION}"
        )
    tree[MODEL_SECTION] = tree.pop(model_type)


def _override(tree: dict[str, Any], key: str, text: str) -> None:
    *parents, last = key.split(".")
    cls: Any = Config
    at = ""
    for name in parents:
        expected = _types(cls)
        if name not in expected:
            raise _unknown(name, at, expected)
        inner = _dataclass_in(expected[name])
        if inner is None:
            raise ConfigError(f"{at}{name} is a value: it has no key {last!r}")
        if not isinstance(tree.get(name), dict):
            tree[name] = {}  # absent or null: the keys that are given switch it on
        tree, cls, at = tree[name], inner, f"{at}{name}."
    if last not in _types(cls):
        raise _unknown(last, at, _types(cls))
    value = load_yaml(text, f"argument --{key}: value {checked.shown(text)}")
    takes = _options(_types(cls)[last])
    if str in takes and not (value is None and types.NoneType in takes):
        value = value if isinstance(value, str) else text  # a folder called 2024 is text
    tree[last] = value


def _build(cls: Any, tree: Mapping[Any, Any], at: str) -> Any:
    expected = _types(cls)
    for key in tree:
        if key not in expected:
            raise _unknown(str(key), at, expected)
    for field in dataclasses.fields(cls):
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and field.name not in tree:
            raise ConfigError(f"{at}{field.name} is missing, expected {_words(expected[field.name])}")
    return cls(**{key: _convert(value, expected[key], f"{at}{key}") for key, value in tree.items()})


def _convert(value: Any, expected: Any, key: str) -> Any:
    """Return `value` as type `expected`. An integer is taken for a float; nothing else changes its type."""
    inner = _dataclass_in(expected)
    if inner is not None and isinstance(value, dict):
        return _build(inner, value, f"{key}.")
    for option in _options(expected):
        if option is types.NoneType and value is None:
            return None
        if option is float and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if option in (int, str, bool) and type(value) is option:
            return value
        if get_origin(option) is Literal and type(value) is str and value in get_args(option):
            return value
        if get_origin(option) is tuple and isinstance(value, list):
            items = get_args(option)
            items = (items[0],) * len(value) if items[-1] is Ellipsis else items
            if len(items) == len(value):
                return tuple(_convert(v, t, f"{key}[{i}]") for i, (v, t) in enumerate(zip(value, items, strict=True)))
    near = ""
    if isinstance(value, str):
        if reason := REFUSED.get((key, value)):
            raise ConfigError(f"{key} is {value!r}: {reason}")
        near = _nearest(value, [str(choice) for choice in get_args(expected) if isinstance(choice, str)])
    raise ConfigError(f"{key}: got {_kind(value)}, expected {_words(expected)}{near}")


def _unknown(name: str, at: str, expected: Mapping[str, Any]) -> ConfigError:
    near = _nearest(name, list(expected))
    elsewhere = {path: path.rpartition(".")[2] for path, *_ in describe()}  # right name, wrong section?
    closest = _nearest(name, [*expected, *elsewhere.values()])
    if closest != near:
        homes = [path for path, last in elsewhere.items() if closest == f"; did you mean {last}?"]
        near = f"; did you mean {' or '.join(homes)}?"
    near = near or f"; there are {', '.join(expected)}"
    return ConfigError(f"{at}{name}: no such key{near}")


def _nearest(name: str, names: Sequence[str]) -> str:
    by_lower = {candidate.lower(): candidate for candidate in names}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return f"; did you mean {by_lower[near[0]]}?" if near else ""


def _types(cls: Any) -> dict[str, Any]:
    return get_type_hints(cls)


def _dataclass_in(expected: Any) -> Any | None:
    """Return the dataclass in `X` or `X | None`, if there is one."""
    return next((option for option in _options(expected) if dataclasses.is_dataclass(option)), None)


def _options(expected: Any) -> tuple[Any, ...]:
    return get_args(expected) if get_origin(expected) in (Union, types.UnionType) else (expected,)


def _kind(value: Any) -> str:
    return "null" if value is None else f"{checked.shown(value)} ({type(value).__name__})"


def _words(expected: Any) -> str:
    if len(_options(expected)) > 1:
        return " or ".join(_words(option) for option in _options(expected))
    if get_origin(expected) is Literal:
        return " or ".join(str(choice) for choice in get_args(expected))
    if get_origin(expected) is tuple and get_args(expected)[-1] is Ellipsis:
        return f"[{_words(get_args(expected)[0])}, ...]"
    if get_origin(expected) is tuple:
        return f"[{', '.join(_words(option) for option in get_args(expected))}]"
    if dataclasses.is_dataclass(expected):
        return f"keys ({', '.join(_types(expected))})"
    return {types.NoneType: "null", bool: "true or false", int: "an integer", float: "a number", str: "text"}[expected]


# --- documentation ---


def _describe(cls: Any, at: str) -> Iterator[tuple[str, str, str, str]]:
    docs = _field_docs(cls)
    for field in dataclasses.fields(cls):
        expected = _types(cls)[field.name]
        inner = _dataclass_in(expected)
        if inner is not None:
            yield from _describe(inner, f"{at}{field.name}.")
            continue
        default = "required" if field.default is dataclasses.MISSING else _yaml_text(field.default)
        yield f"{at}{field.name}", _words(expected), default, docs.get(field.name, "")


def _yaml_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _field_docs(cls: Any) -> dict[str, str]:
    """Return the docstrings under a dataclass's fields (none where the source is not at hand)."""
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    except (OSError, TypeError):
        return {}
    docs: dict[str, str] = {}
    statements = body.body if isinstance(body, ast.ClassDef) else []
    for name, doc in itertools.pairwise(statements):
        if isinstance(name, ast.AnnAssign) and isinstance(name.target, ast.Name) and isinstance(doc, ast.Expr):
            docs[name.target.id] = " ".join(str(ast.literal_eval(doc.value)).split())
    return docs
