"""The errors' names, kinds, and that they cross process borders whole."""

from __future__ import annotations

import pickle

import pytest

from crossdock.dispatch import errors

PROMISED = {
    "CrossdockError": Exception,
    "ConfigError": ValueError,
    "RoutingError": ValueError,
    "DisagreementError": errors.CrossdockError,
    "CapacityError": errors.CrossdockError,
    "LockedError": errors.CapacityError,
    "RankTimeout": TimeoutError,
    "PeerFailed": errors.CrossdockError,
    "PeerClosed": errors.CrossdockError,
    "TransportUnavailable": errors.CrossdockError,
}


@pytest.mark.parametrize("name", PROMISED)
def test_each_promised_error_is_of_its_promised_kind(name):
    kind = getattr(errors, name)
    assert issubclass(kind, PROMISED[name])
    assert issubclass(kind, errors.CrossdockError)


@pytest.mark.parametrize("name", sorted({*PROMISED, *errors.__all__}))
def test_errors_pickle_whole(name):
    error = getattr(errors, name)("rank 3 lost it", ranks=(3, 5))
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == "rank 3 lost it"
    assert again.ranks == (3, 5)
