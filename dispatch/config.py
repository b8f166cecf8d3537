"""Settings of a dispatcher. Every one of them must be the same on all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from crossdock.scratch.errors import ConfigError

__all__ = ["DTYPES", "LEAST_TIMEOUT_S", "DispatchConfig", "check_timeout"]

DTYPES: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16, torch.float32)
MAX_TOP_K = 64
LEAST_TIMEOUT_S = 0.5
"""Less is no more than what a busy host may keep a process waiting."""
MAX_ALIGNMENT = 1024


@dataclass(frozen=True, kw_only=True)
class DispatchConfig:
    """Settings of one dispatcher; validated at construction.

    Attributes:
        num_experts: E, all experts of the layer, over all ranks.
        top_k: K, columns of ``topk_idx``.
        hidden: H, elements of a token's hidden state.
        dtype: The model's dtype: of ``x``, ``y`` and ``out``.
        algorithm: ``"alltoall"`` sends a token to the ranks that own one of its experts;
            ``"allgather"`` sends every token to every rank.
        wire: ``"payload"`` moves ``dtype`` as it is; ``"fp8"`` moves e4m3 with one fp32 scale for
            each 128 elements of a row.
        bucket: ``"grow"``, or the rows to reserve at construction (rounded up to a power of two;
            such a bucket never grows).
        layout: ``"row"``: a token's row once per rank. ``"expert"``: once for each of its experts,
            grouped by expert, so that nothing is permuted (over ``nvshmem``).
        expert_alignment: With ``layout="expert"``, rows of which each expert's first is a multiple.
        num_sms: Streaming multiprocessors that GPU kernels may occupy; None for all of them.
        timeout_s: Seconds after which a rank that did not answer is a ``RankTimeout``; at least
            0.5.
        debug: Fill unused memory with NaN, so that whatever reads it is found out.

    Raises:
        ConfigError: A value is out of its range; names the setting.
    """

    num_experts: int
    top_k: int
    hidden: int
    dtype: torch.dtype = torch.bfloat16
    algorithm: Literal["alltoall", "allgather"] = "alltoall"
    wire: Literal["payload", "fp8"] = "payload"
    bucket: int | Literal["grow"] = "grow"
    layout: Literal["row", "expert"] = "row"
    expert_alignment: int = 1
    num_sms: int | None = None
    timeout_s: float = 100.0
    debug: bool = False

    def __post_init__(self) -> None:
        for name in ("num_experts", "top_k", "hidden"):
            _require_positive_int(name, getattr(self, name))
        if self.top_k > MAX_TOP_K:
            raise ConfigError(f"top_k = {self.top_k}: at most {MAX_TOP_K} experts a token")
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype = {self.dtype}: one of {', '.join(map(str, DTYPES))}")
        _require_one_of("algorithm", self.algorithm, ("alltoall", "allgather"))
        _require_one_of("wire", self.wire, ("payload", "fp8"))
        _require_one_of("layout", self.layout, ("row", "expert"))
        _require_positive_int("expert_alignment", self.expert_alignment)
        if self.expert_alignment > MAX_ALIGNMENT:
            raise ConfigError(
                f"expert_alignment = {self.expert_alignment}: rows, at most {MAX_ALIGNMENT}"
            )
        if self.bucket != "grow":
            _require_positive_int("bucket", self.bucket, also='"grow" or ')
        if self.num_sms is not None:
            _require_positive_int("num_sms", self.num_sms, also="None or ")
        if not isinstance(self.debug, bool):
            raise ConfigError(f"debug = {self.debug!r}: True or False")
        check_timeout(self.timeout_s)


def check_timeout(timeout_s: object) -> None:
    """Raises ConfigError unless these are seconds that ranks can wait for each other."""
    if (
        isinstance(timeout_s, bool)
        or not isinstance(timeout_s, int | float)
        or not LEAST_TIMEOUT_S <= timeout_s < 1e6
    ):
        raise ConfigError(
            f"timeout_s = {timeout_s!r}: seconds, at least {LEAST_TIMEOUT_S} and below 1e6"
        )


def _require_positive_int(name: str, value: object, *, also: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
        raise ConfigError(f"{name} = {value!r}: {also}a whole number from 1 to 2**31 - 1")


def _require_one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} = {value!r}: one of {', '.join(map(repr, allowed))}")
