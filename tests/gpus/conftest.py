"""Fleets of ranks, one at a time, and the seed of this run's inputs."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Iterator, Mapping
from contextlib import ExitStack

import pytest

from crossdock.launch.rig import mps
from crossdock.scratch.errors import TransportUnavailable
from tests.gpus.fleet import FLEETS, Crew, Fleet


class Crews:
    """The crew at work, and what its GPU needs; the next one begins when it has left."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._crew: Crew | None = None

    def get(self, fleet: Fleet) -> Crew:
        if self._crew is None or self._crew.fleet != fleet:
            self.close()
            self._crew = Crew(fleet, self._environment(fleet))
            self._stack.callback(self._crew.close)
        return self._crew

    def environment(self, fleet: Fleet) -> Mapping[str, str]:
        """For ranks of a fleet that are not a crew; the crew at work leaves."""
        self.close()
        return self._environment(fleet)

    def close(self) -> None:
        self._crew = None
        self._stack.close()

    def _environment(self, fleet: Fleet) -> Mapping[str, str]:
        if "nvshmem" in str(fleet) and importlib.util.find_spec("nvshmem") is None:
            pytest.skip("no NVSHMEM: pip install 'crossdock[cu13]'")
        if not fleet.shares_gpu:
            return {}
        try:
            return self._stack.enter_context(mps())
        except TransportUnavailable as error:
            pytest.skip(str(error))


@pytest.fixture(scope="session")
def crews() -> Iterator[Crews]:
    crews = Crews()
    yield crews
    crews.close()


@pytest.fixture
def crew(crews: Crews, fleet: Fleet) -> Crew:
    """``crew(fn, *args)``: all ranks of the fleet."""
    return crews.get(fleet)


@pytest.fixture
def seed() -> int:
    """Another one each time; a failure shows it, as part of the case."""
    return random.SystemRandom().randrange(2**31)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A crew's tests follow each other, so that it starts once."""
    places = [i for i, item in enumerate(items) if _fleet(item) is not None]
    mine = sorted((items[i] for i in places), key=_turn)
    for place, item in zip(places, mine, strict=True):
        items[place] = item


def _turn(item: pytest.Item) -> tuple[int, bool]:
    fleet = _fleet(item)
    assert fleet is not None and isinstance(item, pytest.Function)
    return FLEETS.index(fleet), "crew" not in item.fixturenames


def _fleet(item: pytest.Item) -> Fleet | None:
    callspec = getattr(item, "callspec", None)
    fleet = callspec.params.get("fleet") if callspec is not None else None
    return fleet if isinstance(fleet, Fleet) else None
