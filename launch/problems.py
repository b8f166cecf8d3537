"""What pydantic finds wrong, said in the words of the configuration file."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from crossdock.launch.models import Config
from crossdock.launch.yaml_file import KeyPath, Problem, YamlDocument, shorten

__all__ = ["problems_of"]

_WANTED: dict[str, str] = {
    "int_type": "a whole number is wanted",
    "int_from_float": "a whole number is wanted",
    "float_type": "a number is wanted",
    "string_type": "text is wanted",
    "string_too_short": "a name is wanted",
    "bool_type": "true or false is wanted",
    "list_type": "a list is wanted",
    "model_type": "a mapping of keys is wanted",
    "finite_number": "a finite number is wanted",
    "greater_than_equal": "at least {ge} is wanted",
    "greater_than": "more than {gt} is wanted",
    "less_than_equal": "at most {le} is wanted",
    "less_than": "less than {lt} is wanted",
}


def problems_of(
    error: ValidationError, document: YamlDocument, most: int
) -> tuple[list[Problem], int]:
    """Pydantic's errors at their keys in the file, in plain words.

    Where a key takes either of two types, pydantic reports each of them as missed; one problem is
    enough, the one deepest in the value.

    Args:
        error: What pydantic raised.
        document: The file.
        most: Problems to put in words.

    Returns:
        The first problems, and how many more there are.
    """
    by_path: dict[KeyPath, list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        by_path.setdefault(_key_path(detail["loc"], document.data), []).append(detail)
    above = {path[:length] for path in by_path for length in range(len(path))}
    deepest = [path for path in by_path if path not in above]
    shown = [Problem(path, _message(by_path[path], path, document)) for path in deepest[:most]]
    return shown, len(deepest) - len(shown)


def _key_path(location: tuple[int | str, ...], data: Any) -> KeyPath:
    """Pydantic's location without the names of union members that it puts between the keys."""
    path: KeyPath = ()
    for index, part in enumerate(location):
        if isinstance(data, dict) and (part in data or index == len(location) - 1):
            data = data.get(part)
        elif isinstance(data, list) and isinstance(part, int):
            data = data[part]
        else:
            continue
        path += (part,)
    return path


def _message(details: Sequence[ErrorDetails], path: KeyPath, document: YamlDocument) -> str:
    first = details[0]
    if first["type"] == "extra_forbidden":
        return f"unknown key{_did_you_mean(str(path[-1]), _siblings(path))}"
    if first["type"] == "missing":
        return "missing"
    written = document.raw(path) or str(first["input"])
    wanted = " or ".join(_wanted(detail) for detail in details)
    hint = ""
    if isinstance(first["input"], bool) and written.lower() not in ("true", "false"):
        hint = f" (YAML reads {written} as {str(first['input']).lower()})"
    elif first["type"] == "literal_error":
        hint = _did_you_mean(written, _choices(first), or_list=False)
    elif first["type"] in ("int_type", "float_type") and isinstance(first["input"], str):
        hint = " (text; YAML wants 1.0e-3 for 1e-3)" if _looks_like_a_number(written) else " (text)"
    return f"{wanted}, not {shorten(written)}{hint}"


def _looks_like_a_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _wanted(detail: ErrorDetails) -> str:
    if detail["type"] == "literal_error":
        choices = _choices(detail)
        return f"{'one of ' if len(choices) > 1 else ''}{', '.join(choices)} is wanted"
    return _WANTED.get(detail["type"], detail["msg"]).format(**detail.get("ctx", {}))


def _choices(literal_error: ErrorDetails) -> list[str]:
    expected = str(literal_error["ctx"]["expected"])
    return expected.replace("'", "").replace(" or ", ", ").split(", ")


def _did_you_mean(word: str, choices: Sequence[str], *, or_list: bool = True) -> str:
    close = difflib.get_close_matches(shorten(word), choices, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; known: {', '.join(choices)}" if or_list else ""


def _siblings(path: KeyPath) -> list[str]:
    """The keys that the model of the section around ``path`` has."""
    model: type[BaseModel] = Config
    for part in path[:-1]:
        annotation = model.model_fields[str(part)].annotation
        assert isinstance(annotation, type)
        assert issubclass(annotation, BaseModel)
        model = annotation
    return list(model.model_fields)
