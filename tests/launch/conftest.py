"""Small configurations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from crossdock.launch.config import Job, load_job

CONFIGS = Path(__file__).parents[2] / "configs"

SMALL = """\
version: 1
name: small
cluster: {nodes: 1, ranks_per_node: 4, device: cpu}
parallel: {dp: 2, pcp: 2}
moe: {num_experts: 6, top_k: 2, hidden: 16, intermediate: 8}
run:
  steps: 3
  batch: {prefill: [[7, 0], [5]], decode: [3, 0]}
  routing: {zipf: 1.1}
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A configuration file that is right."""
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path


@pytest.fixture
def small_job(small: Path) -> Callable[..., Job]:
    """``small_job("key.path=value", ...)``."""
    return lambda *overrides: load_job(small, overrides)
