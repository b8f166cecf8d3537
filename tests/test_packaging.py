"""The package table of pyproject.toml names every package, and the README's code runs."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TOP = ("dispatch", "experts", "launch", "scratch")


def test_every_package_is_in_the_table():
    found = {
        "crossdock." + ".".join(init.parent.relative_to(ROOT).parts)
        for top in TOP
        for init in (ROOT / top).rglob("__init__.py")
    }
    assert found == set(PROJECT["tool"]["setuptools"]["packages"])


def test_every_cuda_source_is_package_data():
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["*"]
    for top in TOP:
        for source in (ROOT / top).rglob("*.cu*"):
            assert any(source.match(pattern) for pattern in patterns), source


def test_the_code_in_the_readme_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out == "[(5, 64), (6, 64), (7, 64), (8, 64)]\n"
