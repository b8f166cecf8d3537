"""One YAML file as plain data that remembers the line of every key.

PyYAML's loader forgets positions and takes the last of two equal keys; here the node tree is kept
beside the data, so that an error found later can still say where it stands.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from crossdock.scratch.errors import ConfigError

__all__ = ["KeyPath", "Problem", "YamlDocument", "dotted", "read_yaml", "shorten"]

KeyPath = tuple[str | int, ...]
MAX_BYTES = 1 << 20
_TAG = "tag:yaml.org,2002:"
_MOST_DIGITS = 100
# Control characters that a terminal would act on, and halves of surrogate pairs.
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_NOT_YAML = (
    yaml.YAMLError,
    RecursionError,
    ValueError,
    TypeError,
    OverflowError,
    LookupError,
    AttributeError,
)


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


def shorten(text: str, most: int = 60) -> str:
    """The beginning of a long text, with escapes for what a terminal does not show."""
    cut = text if len(text) <= most else f"{text[: most - 3]}..."
    return _HIDDEN.sub(lambda found: ascii(found[0])[1:-1], cut)


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
        said = f"override {shorten(assignment, 200)}"
        name, equals, text = assignment.partition("=")
        if not equals or not all(name.split(".")):
            raise ConfigError(f"{said}: write it as key.path=value")
        path: KeyPath = ()
        target: Any = self.data
        *parents, last = name.split(".")
        for part in parents:
            path += (_key_in(target, part, said),)
            if isinstance(target, dict):
                target.setdefault(part, {})
            target = target[path[-1]]
        path += (_key_in(target, last, said),)
        try:
            target[path[-1]] = _construct(text)
        except _UnsupportedError as error:
            raise ConfigError(f"{said}: {error}") from None
        except _NOT_YAML as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"{said}: the value is not YAML: {reason}") from None
        for known in [p for p in self._raw if p[: len(path)] == path]:
            self._raw.pop(known)
            self._lines.pop(known, None)
        for replaced in [p for p in self._overrides if p[: len(path)] == path]:
            del self._overrides[replaced]
        self._raw[path] = text
        self._overrides[path] = said

    def raw(self, path: KeyPath) -> str | None:
        """The scalar at ``path`` as it was written (``no``, not False); None where unknown."""
        return self._raw.get(path)

    def where(self, path: KeyPath) -> str:
        """``file:line`` of a key, or of the nearest key above it, or the override that set it."""
        for length in range(len(path), -1, -1):
            prefix = path[:length]
            if prefix in self._overrides:
                return self._overrides[prefix]
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
        _refuse_unsupported(root)
        data = loader.construct_document(root)
    except _UnsupportedError as error:
        raise ConfigError(f"{path}:{error.line}: {error}") from None
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
    except _NOT_YAML as error:
        raise ConfigError(f"{path}: not usable YAML: {error}") from None
    if not isinstance(root, yaml.MappingNode) or not isinstance(data, dict):
        raise ConfigError(f"{path}:1: a mapping of keys is wanted, as in configs/laptop.yaml")
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


class _UnsupportedError(Exception):
    """YAML that a configuration cannot be written in.

    Attributes:
        line: Where it stands.
    """

    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line


def _construct(text: str) -> Any:
    loader = yaml.SafeLoader(text)
    root = loader.get_single_node()
    if root is None:
        return None
    _refuse_unsupported(root)
    return loader.construct_document(root)


def _refuse_unsupported(root: yaml.Node) -> None:
    # Aliases make one node stand in two places (or in itself), and lines ambiguous. The rest is
    # what no configuration has, and what messages could not repeat.
    seen: set[int] = set()
    waiting, scalars = [root], yaml.SafeLoader("")
    while waiting:
        node = waiting.pop()
        line = node.start_mark.line + 1
        if isinstance(node, yaml.ScalarNode):
            if _HIDDEN.search(node.value):
                text = shorten(node.value)
                raise _UnsupportedError(line, f"characters that cannot be shown, in {text}")
            if node.tag == _TAG + "int" and len(node.value) > _MOST_DIGITS:
                raise _UnsupportedError(line, f"a number of {len(node.value)} digits")
            try:
                scalars.construct_object(node)
            except yaml.YAMLError:
                raise  # which has a line
            except _NOT_YAML as error:  # a date of month 13, say
                kind = node.tag.removeprefix(_TAG)
                text = f"{shorten(node.value)} is no usable {kind} ({shorten(str(error))})"
                raise _UnsupportedError(line, " ".join(text.split())) from None
            continue
        if id(node) in seen:
            raise _UnsupportedError(line, "anchors and aliases are not supported; write it out")
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                _refuse_key(key)
                waiting += [key, value]
        elif isinstance(node, yaml.SequenceNode):
            waiting += node.value


def _refuse_key(key: yaml.Node) -> None:
    line = key.start_mark.line + 1
    if key.tag == _TAG + "merge":
        raise _UnsupportedError(line, "merge keys (<<) are not supported; write it out")
    if not isinstance(key, yaml.ScalarNode):
        raise _UnsupportedError(line, "a key is text, not a list or a mapping")
    if key.tag != _TAG + "str":
        raise _UnsupportedError(line, f"a key is text, not {shorten(key.value)}: quote it")


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


def _key_in(target: Any, part: str, said: str) -> str | int:
    if isinstance(target, dict):
        if _HIDDEN.search(part):
            raise ConfigError(f"{said}: a key has characters that cannot be shown")
        return part
    if isinstance(target, list) and re.fullmatch("[0-9]{1,9}", part) and int(part) < len(target):
        return int(part)
    raise ConfigError(f"{said}: there is no {shorten(part)!r} to set")
