"""YAML text -> plain values, the line of every key, and everything wrong with the text.

What a user wrote is what is meant, which PyYAML's YAML 1.1 does not promise. Plain scalars follow
the core schema of YAML 1.2 instead: ``1e-5`` is a number, ``on``, ``off``, ``yes`` and ``no`` are text,
``012`` is twelve, a date is text. Duplicate keys, tags and values that hold themselves are problems.
Nothing is constructed but dict, list, str, int, float, bool and None.
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import yaml

KeyPath = tuple[str | int, ...]


class Problem(NamedTuple):
    """Something wrong with the text, at a line counted from 1."""

    line: int
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """The values of a YAML text; of a key given twice, the last.

    Args:
        value: None where the text is empty or is not YAML.
        lines: the line of every key and list item, by its path from the top.
        problems: in the order of the text.
    """

    value: Any
    lines: dict[KeyPath, int]
    problems: tuple[Problem, ...]


def parse_yaml(text: str) -> Document:
    """The document ``text`` holds. Never raises: what is wrong is among the problems."""
    builder = _Builder()
    value = None
    try:
        node = _compose(text)
        if node is not None:
            value = builder.build(node, ())
    except yaml.MarkedYAMLError as error:
        builder.problems.append(_explain(error))
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        builder.problems.append(Problem(line, f"not valid YAML: the character {chr(error.character)!r} is not allowed"))
    except RecursionError:
        builder.problems.append(Problem(1, "nested too deeply"))
    return Document(value=value, lines=builder.lines, problems=tuple(builder.problems))


class _CoreLoader(yaml.SafeLoader):
    """SafeLoader that tells plain scalars apart by YAML 1.2's core schema."""


_NULL, _BOOL, _INT, _FLOAT, _STR, _SEQ, _MAP = (
    f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str", "seq", "map")
)
_SCALARS: tuple[tuple[str, str, list[str | None]], ...] = (
    (_NULL, r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    (_BOOL, r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    (_INT, r"[-+]?[0-9]+(?:_[0-9]+)*|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (_FLOAT, r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", list("-+.0123456789")),
)
_CoreLoader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in _SCALARS:
    _CoreLoader.add_implicit_resolver(_tag, re.compile(rf"(?:{_pattern})\Z"), _first)


def _read_bool(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"


def _read_int(text: str) -> int:
    return int(text, 0) if text.startswith(("0x", "0o")) else int(text)


def _read_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


_READERS: dict[str, Callable[[str], Any]] = {
    _STR: str,
    _NULL: lambda _: None,
    _BOOL: _read_bool,
    _INT: _read_int,
    _FLOAT: _read_float,
}


def _compose(text: str) -> yaml.Node | None:
    loader = _CoreLoader(text)
    try:
        node: yaml.Node | None = loader.get_single_node()
        return node
    finally:
        loader.dispose()


class _Builder:
    """Nodes -> values, noting lines and problems on the way."""

    def __init__(self) -> None:
        self.lines: dict[KeyPath, int] = {}
        self.problems: list[Problem] = []
        self._open: set[int] = set()

    def build(self, node: yaml.Node, path: KeyPath) -> Any:
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node)
        if id(node) in self._open:
            self._problem(node, f"{_dotted(path)} holds itself (an alias to a value it is part of)")
            return None
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode) and node.tag == _MAP:
                return {key: self.build(value, (*path, key)) for key, value in self._items(node, path)}
            if isinstance(node, yaml.SequenceNode) and node.tag == _SEQ:
                return [self._item(item, (*path, index)) for index, item in enumerate(node.value)]
        finally:
            self._open.discard(id(node))
        self._refuse_tag(node)
        return None

    def _item(self, node: yaml.Node, path: KeyPath) -> Any:
        self.lines[path] = _line(node)
        return self.build(node, path)

    def _items(self, node: yaml.MappingNode, path: KeyPath) -> Iterator[tuple[str, yaml.Node]]:
        # lines of this mapping's own keys: the same node reached through two aliases is no duplicate
        first_lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self._problem(key_node, "a key must be text, not a list or a mapping")
                continue
            key = key_node.value
            if key in first_lines:
                self._problem(key_node, f"duplicate key {_dotted((*path, key))!r}, first on line {first_lines[key]}")
            first_lines.setdefault(key, _line(key_node))
            self.lines[(*path, key)] = _line(key_node)
            yield key, value_node

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        read = _READERS.get(node.tag)
        if read is None:
            self._refuse_tag(node)
            return None
        try:
            return read(node.value)
        except ValueError:
            self._problem(node, f"{node.value[:40]} is not a finite {node.tag.rpartition(':')[2]}")
            return None

    def _refuse_tag(self, node: yaml.Node) -> None:
        self._problem(
            node, f"the tag {node.tag.replace('tag:yaml.org,2002:', '!!')!r} is not allowed; write the plain value"
        )

    def _problem(self, node: yaml.Node, message: str) -> None:
        self.problems.append(Problem(_line(node), message))


def _explain(error: yaml.MarkedYAMLError) -> Problem:
    mark = error.problem_mark or error.context_mark
    message = f"not valid YAML: {error.problem or error.context}"
    if "alias" in f"{error.problem} {error.context}":
        message += "; quote a value that begins with '*', like '*.q_proj'"
    return Problem(mark.line + 1 if mark else 1, message)


def _line(node: yaml.Node) -> int:
    mark = node.start_mark
    return mark.line + 1 if mark else 1


def _dotted(path: KeyPath) -> str:
    return ".".join(str(part) for part in path)
