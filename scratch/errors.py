"""Every exception that Crossdock raises for its users.

All of them pickle, so that they cross process and thread borders whole. Internal invariants are
``assert``; these are for people, and say what was wrong, where, and what to change.
"""

from __future__ import annotations

__all__ = [
    "CapacityError",
    "ConfigError",
    "CrossdockError",
    "DisagreementError",
    "HandleError",
    "LockedError",
    "PeerClosed",
    "PeerFailed",
    "RankTimeout",
    "RoutingError",
    "TransportUnavailable",
]


class CrossdockError(Exception):
    """Base of all errors of this library.

    Attributes:
        ranks: The EP ranks that the error names (the first offender, the ranks that are missing,
            the ranks that disagree); empty where no rank is to blame.
        agreed: True where every rank of the EP group raised this error in the same call.
    """

    ranks: tuple[int, ...]
    agreed: bool

    def __init__(self, message: str = "", *, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks
        self.agreed = False


class ConfigError(CrossdockError, ValueError):
    """A setting, a file or a launch that cannot work."""


class RoutingError(CrossdockError, ValueError):
    """Tokens, ids or weights handed to a dispatch or a combine that cannot be used."""


class HandleError(RoutingError):
    """A handle that is stale, used up, or another dispatcher's."""


class DisagreementError(CrossdockError):
    """Ranks differ in a setting, or called different operations."""


class CapacityError(CrossdockError):
    """Memory, a bucket, a slot or a scratch that is too small and could not grow."""


class LockedError(CapacityError):
    """Growth was needed after locking, or in a bucket of fixed size."""


class RankTimeout(CrossdockError, TimeoutError):  # noqa: N818 - promised name
    """One or more ranks never answered; the transport is broken from then on."""


class PeerFailed(CrossdockError):  # noqa: N818 - promised name
    """Another rank failed between two calls and said so."""


class PeerClosed(CrossdockError):  # noqa: N818 - promised name
    """Another rank closed its dispatcher while this one still calls."""


class TransportUnavailable(CrossdockError):  # noqa: N818 - promised name
    """This machine or installation lacks what a transport needs; the message says what to get."""
