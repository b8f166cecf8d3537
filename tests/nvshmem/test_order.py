"""Launches of one transport follow each other, whatever streams they are on."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from crossdock.dispatch.transports import nvshmem


@pytest.fixture
def seen(monkeypatch):
    """What is asked of CUDA, in order, while ``stream`` is the current one."""
    seen = SimpleNamespace(calls=[], stream=1)

    def stream():
        number = seen.stream
        return SimpleNamespace(
            number=number, wait_event=lambda _: seen.calls.append(f"{number} waits")
        )

    event = SimpleNamespace(record=lambda on: seen.calls.append(f"recorded on {on.number}"))
    monkeypatch.setattr(nvshmem, "raw_stream", lambda _: seen.stream)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream())
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    return seen


def use(order, seen, *streams: int) -> list[str]:
    seen.calls.clear()
    for seen.stream in streams:
        with order:
            seen.calls.append(f"launch on {seen.stream}")
    return list(seen.calls)


def test_one_stream_needs_no_events(seen):
    order = nvshmem._Order(torch.device("cpu"))
    assert use(order, seen, 1, 1, 1) == ["launch on 1"] * 3


def test_a_second_stream_waits_for_all_that_is_on_the_first(seen):
    order = nvshmem._Order(torch.device("cpu"))
    use(order, seen, 1)
    assert use(order, seen, 2)[:3] == ["recorded on 1", "2 waits", "launch on 2"]


def test_from_then_on_streams_wait_for_launches_alone(seen):
    order = nvshmem._Order(torch.device("cpu"))
    use(order, seen, 1, 2)
    assert use(order, seen, 2, 1) == [
        "launch on 2",
        "recorded on 2",
        "1 waits",
        "launch on 1",
        "recorded on 1",
    ]
    assert use(order, seen, 3) == ["3 waits", "launch on 3", "recorded on 3"]
