"""Launches of one transport follow each other, whatever streams they are on."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import SimpleNamespace

import pytest
import torch

from crossdock.dispatch.transports import nvshmem


class Visit(AbstractContextManager[None]):
    """A device is the current one meanwhile."""

    def __init__(self, seen: SimpleNamespace, device: int) -> None:
        self._seen, self._device = seen, device

    def __enter__(self) -> None:
        self._before, self._seen.device = self._seen.device, self._device

    def __exit__(self, *_: object) -> None:
        self._seen.device = self._before


@pytest.fixture
def seen(monkeypatch):
    """What is asked of CUDA, in order, while ``stream`` is the current one."""
    seen = SimpleNamespace(calls=[], stream=1, device=0)

    def stream():
        number = seen.stream
        return SimpleNamespace(
            number=number, wait_event=lambda _: seen.calls.append(f"{number} waits")
        )

    event = SimpleNamespace(record=lambda on: seen.calls.append(f"recorded on {on.number}"))
    monkeypatch.setattr(nvshmem, "raw_stream", lambda _: seen.stream)
    monkeypatch.setattr(nvshmem, "current_device", lambda: seen.device)
    monkeypatch.setattr(torch.cuda, "device", lambda device: Visit(seen, device.index))
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
    order = nvshmem._Order(torch.device("cuda:0"))
    assert use(order, seen, 1, 1, 1) == ["launch on 1"] * 3


def test_a_second_stream_waits_for_all_that_is_on_the_first(seen):
    order = nvshmem._Order(torch.device("cuda:0"))
    use(order, seen, 1)
    assert use(order, seen, 2)[:3] == ["recorded on 1", "2 waits", "launch on 2"]


def test_from_then_on_streams_wait_for_launches_alone(seen):
    order = nvshmem._Order(torch.device("cuda:0"))
    use(order, seen, 1, 2)
    assert use(order, seen, 2, 1) == [
        "launch on 2",
        "recorded on 2",
        "1 waits",
        "launch on 1",
        "recorded on 1",
    ]
    assert use(order, seen, 3) == ["3 waits", "launch on 3", "recorded on 3"]


def test_another_device_is_the_current_one_again_afterwards(seen):
    order = nvshmem._Order(torch.device("cuda:1"))
    with order:
        assert seen.device == 1
    assert seen.device == 0
