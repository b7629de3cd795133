"""Strict YAML: plain values with strings as keys, each given once. For the trainer's configuration and for chaos scenarios.

Owns what YAML may hold here: null, booleans, numbers of 64 bits, strings, lists and mappings, of bounded size and depth. A date is a string,
and `1e-4` is a number, as YAML 1.2 has both. Every violation is a ConfigError of one line. Never guesses.
"""

from __future__ import annotations

import os
import re
from collections.abc import Hashable
from typing import Any

import yaml

from ttp.errors import ConfigError
from ttp.inputs import checked
from ttp.inputs.input_file import read_text

MOST_BYTES = 1 << 20
MOST_NODES = 20_000
"""Values of a document, each alias counted with all that it stands for."""


def read_yaml_file(path: str | os.PathLike[str], where: str) -> Any:
    """Return the value in a file; `where` names it in errors. Raises FileNotFoundError, ConfigError."""
    try:
        text = read_text(path, MOST_BYTES)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read ({error.strerror}), expected a readable file in YAML") from None
    return load_yaml(text, where)


def load_yaml(text: str, where: str) -> Any:
    """Return the value of a document; `where` names it in errors. Raises ConfigError."""
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _check_size(node)
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = f"line {mark.line + 1}: " if mark is not None else ""
        raise ConfigError(f"{where}: invalid YAML: {at}{_one_line(error.problem or error.context or error)}") from None
    except RecursionError:
        raise ConfigError(f"{where}: invalid YAML: expected at most {checked.DEEPEST} levels") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{where}: invalid YAML: {_one_line(error)}") from None


def _one_line(error: object) -> str:
    return " ".join(str(error).split())


def _check_size(root: yaml.Node) -> None:
    """Refuse what is too deep, too large or holds itself, before anything recurses into it."""
    level, count = [root], 0
    for _ in range(checked.DEEPEST + 1):
        count += len(level)
        if count > MOST_NODES:
            raise ValueError(f"got more than {MOST_NODES} values, expected fewer")
        level = [child for node in level for child in _children(node)]
        if not level:
            return
    raise ValueError(f"got values nested deeper than {checked.DEEPEST} levels, expected fewer")


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [each for pair in node.value for each in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


class _Loader(yaml.SafeLoader):
    """Knows the tags of plain values and no others."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise _problem(f"key: got {checked.shown(key)}, expected a string", key_node)
            if key in seen:
                raise _problem(f"key {key!r} is given twice in one section", key_node)
            seen.add(key)
        return super().construct_mapping(node, deep)

    def string(self, node: yaml.ScalarNode) -> str:
        return checked.string(self.construct_yaml_str(node), "value")

    def boolean(self, node: yaml.ScalarNode) -> bool:
        if str(self.construct_scalar(node)).lower() not in self.bool_values:
            raise _problem(f"got {checked.shown(node.value)}, expected true or false", node)
        return bool(self.construct_yaml_bool(node))

    def integer(self, node: yaml.ScalarNode) -> int:
        try:
            return checked.integer(int(self.construct_yaml_int(node)), "value", -checked.INT64_MAX)
        except (ValueError, IndexError):
            raise _problem(f"got {checked.shown(node.value)}, expected an integer of 64 bits", node) from None

    def number(self, node: yaml.ScalarNode) -> float:
        try:
            return float(self.construct_yaml_float(node))
        except (ValueError, IndexError, OverflowError):
            raise _problem(f"got {checked.shown(node.value)}, expected a number", node) from None

    def unknown(self, node: yaml.Node) -> None:
        raise _problem(f"got a value of type {checked.shown(node.tag)}, expected a plain one", node)


def _problem(text: str, node: yaml.Node) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, text, node.start_mark)


_TAG = "tag:yaml.org,2002:"
_Loader.yaml_constructors = {
    f"{_TAG}null": yaml.SafeLoader.construct_yaml_null,
    f"{_TAG}bool": _Loader.boolean,
    f"{_TAG}int": _Loader.integer,
    f"{_TAG}float": _Loader.number,
    f"{_TAG}str": _Loader.string,
    f"{_TAG}seq": yaml.SafeLoader.construct_yaml_seq,
    f"{_TAG}map": yaml.SafeLoader.construct_yaml_map,
    None: _Loader.unknown,
}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":timestamp", ":value"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    f"{_TAG}float",
    re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+\Z"),
    list("-+.0123456789"),
)
