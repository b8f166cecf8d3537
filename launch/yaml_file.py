"""One YAML file as plain data that remembers the line of every key.

PyYAML's loader forgets positions and takes the last of two equal keys; here the node tree is kept
beside the data, so that an error found later can still say where it stands.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from crossdock.scratch.errors import ConfigError

__all__ = ["KeyPath", "Problem", "YamlDocument", "dotted", "read_yaml"]

KeyPath = tuple[str | int, ...]
MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a document: which key, and what about it."""

    path: KeyPath
    message: str


def dotted(path: Sequence[str | int]) -> str:
    """``("run", "batch", "decode", 1)`` as ``run.batch.decode[1]``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


class YamlDocument:
    """A mapping read from a file, changed by overrides, with the origin of each of its keys.

    Attributes:
        path: The file.
        data: The plain data: mappings, lists and scalars.
        problems: Duplicate keys, which PyYAML would take silently.
    """

    def __init__(self, path: Path, data: dict[str, Any], root: yaml.MappingNode) -> None:
        self.path = path
        self.data = data
        self.problems: list[Problem] = []
        self._lines: dict[KeyPath, int] = {(): 1}
        self._raw: dict[KeyPath, str] = {}
        self._overrides: dict[KeyPath, str] = {}
        for key_path, line, raw in _walk(root, (), self.problems):
            self._lines[key_path] = line
            self._raw[key_path] = raw

    def override(self, assignment: str) -> None:
        """Apply ``key.path=value``; the value is YAML, list entries are numbered from 0.

        Raises:
            ConfigError: Not an assignment, or its path leads through something without keys.
        """
        name, equals, text = assignment.partition("=")
        if not equals or not all(name.split(".")):
            raise ConfigError(f"override {assignment}: write it as key.path=value")
        path: KeyPath = ()
        target: Any = self.data
        *parents, last = name.split(".")
        for part in parents:
            path += (_key_in(target, part, assignment),)
            if isinstance(target, dict):
                target.setdefault(part, {})
            target = target[path[-1]]
        path += (_key_in(target, last, assignment),)
        try:
            target[path[-1]] = yaml.safe_load(text)
        except (yaml.YAMLError, RecursionError, ValueError, LookupError, AttributeError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"override {assignment}: the value is not YAML: {reason}") from None
        for known in [p for p in self._raw if p[: len(path)] == path]:
            self._raw.pop(known)
            self._lines.pop(known, None)
        for replaced in [p for p in self._overrides if p[: len(path)] == path]:
            del self._overrides[replaced]
        self._raw[path] = text
        self._overrides[path] = assignment

    def raw(self, path: KeyPath) -> str | None:
        """The scalar at ``path`` as it was written (``no``, not False); None where unknown."""
        return self._raw.get(path)

    def where(self, path: KeyPath) -> str:
        """``file:line`` of a key, or of the nearest key above it, or the override that set it."""
        for length in range(len(path), -1, -1):
            prefix = path[:length]
            if prefix in self._overrides:
                return f"override {self._overrides[prefix]}"
            if prefix in self._lines:
                return f"{self.path}:{self._lines[prefix]}"
        raise AssertionError("the root has a line")


def read_yaml(path: Path) -> YamlDocument:
    """Read one YAML mapping with the line of every key.

    Raises:
        ConfigError: There is no such file, or it is no YAML mapping; one line, ``file:line`` first
            where there is a line.
    """
    text = _read_text(path)
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None:
            raise ConfigError(f"{path}: the file is empty; configs/ has examples")
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(f"{path}:1: a mapping of keys is wanted, as in configs/laptop.yaml")
        _refuse_aliases(root, path)
        data = loader.construct_document(root)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}{line}: not YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path}: not a YAML text file: {reason}") from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply to be a configuration") from None
    except ConfigError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError) as error:  # a date of month 13, say
        raise ConfigError(f"{path}: not usable YAML: {error}") from None
    return YamlDocument(path, data, root)


def _read_text(path: Path) -> str:
    try:
        if path.is_dir():
            raise ConfigError(f"{path}: is a directory; name the YAML file in it")
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except ConfigError:
        raise
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{path}: larger than {MAX_BYTES >> 20} MiB, so not a configuration")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file (byte {error.start} is not UTF-8)") from None


def _refuse_aliases(root: yaml.Node, path: Path) -> None:
    """An alias makes one node stand in two places (or in itself), and lines ambiguous."""
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if id(node) in seen and not isinstance(node, yaml.ScalarNode):
            line = node.start_mark.line + 1
            raise ConfigError(f"{path}:{line}: anchors and aliases are not supported; write it out")
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            waiting += [child for pair in node.value for child in pair]
        elif isinstance(node, yaml.SequenceNode):
            waiting += node.value


def _walk(
    node: yaml.Node, path: KeyPath, problems: list[Problem]
) -> Iterator[tuple[KeyPath, int, str]]:
    """Yield (path, line, raw scalar text) of all keys and entries below a node."""
    if isinstance(node, yaml.MappingNode):
        first_line: dict[str, int] = {}
        for key, value in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            child = (*path, name)
            if name in first_line:
                problems.append(Problem(child, f"duplicate key, first in line {first_line[name]}"))
            first_line.setdefault(name, line)
            yield child, line, value.value if isinstance(value, yaml.ScalarNode) else ""
            yield from _walk(value, child, problems)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            child = (*path, index)
            raw = value.value if isinstance(value, yaml.ScalarNode) else ""
            yield child, value.start_mark.line + 1, raw
            yield from _walk(value, child, problems)


def _key_in(target: Any, part: str, assignment: str) -> str | int:
    if isinstance(target, dict):
        return part
    if isinstance(target, list) and part.isdecimal() and int(part) < len(target):
        return int(part)
    raise ConfigError(f"override {assignment}: there is no {part!r} to set")
