"""Recorded routing: which experts a trained model's tokens chose, layer by layer.

The file format is described in ``configs/traces/README.md``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from crossdock.scratch.errors import ConfigError

__all__ = ["Trace", "TraceInfo", "is_file", "read_trace", "read_trace_info", "write_trace"]

_IDX_DTYPES = {"U8", "I8", "I16", "I32", "I64"}
_WEIGHT_DTYPES = {"F16", "BF16", "F32"}
_NAMES = ("topk_idx", "topk_weights")


@dataclass(frozen=True, kw_only=True)
class TraceInfo:
    """What a trace's header says."""

    num_layers: int
    num_tokens: int
    top_k: int
    num_experts: int
    metadata: dict[str, str]


@dataclass(frozen=True, kw_only=True, eq=False)
class Trace:
    """Recorded routing, checked.

    Attributes:
        topk_idx: Integer [layers, tokens, K]: global expert ids, -1 for none.
        topk_weights: Floating [layers, tokens, K].
        num_experts: E.
        metadata: Anything else that the file says about itself.

    Raises:
        ConfigError: Shapes that do not match, an id outside [-1, E), an expert twice in one token,
            or a weight of a chosen expert that is not finite.
    """

    topk_idx: Tensor
    topk_weights: Tensor
    num_experts: int
    metadata: Mapping[str, str]

    def __post_init__(self) -> None:
        idx, weights = self.topk_idx, self.topk_weights
        if idx.dim() != 3 or 0 in idx.shape or idx.shape != weights.shape:
            raise ConfigError(
                f"topk_idx {list(idx.shape)} and topk_weights {list(weights.shape)}: both must be "
                "[layers, tokens, top_k], none of them 0"
            )
        if idx.is_floating_point() or not weights.is_floating_point():
            raise ConfigError(
                f"topk_idx {idx.dtype} and topk_weights {weights.dtype}: integers and floats wanted"
            )
        ids = idx.long()
        _refuse((ids < -1) | (ids >= self.num_experts), ids, f"not one of {self.num_experts}")
        by_id = ids.sort(-1).values
        repeated = (by_id[..., 1:] == by_id[..., :-1]) & (by_id[..., 1:] >= 0)
        _refuse(repeated, by_id[..., 1:], "twice in one token")
        _refuse((ids >= 0) & ~weights.isfinite(), ids, "with a weight that is not finite")

    @property
    def num_layers(self) -> int:
        """Layers recorded."""
        return int(self.topk_idx.shape[0])

    @property
    def num_tokens(self) -> int:
        """N, tokens recorded in each layer."""
        return int(self.topk_idx.shape[1])

    @property
    def top_k(self) -> int:
        """K."""
        return int(self.topk_idx.shape[2])

    def expert_counts(self) -> Tensor:
        """int64 [layers, E]: how often each expert was chosen."""
        ids = self.topk_idx.long().flatten(1)
        counts = torch.zeros(self.num_layers, self.num_experts + 1, dtype=torch.int64)
        counts.scatter_add_(1, ids + 1, torch.ones_like(ids))
        return counts[:, 1:]

    def part(self, layers: slice, tokens: slice) -> Trace:
        """A trace of some of the layers and tokens.

        Raises:
            ConfigError: Nothing is left.
        """
        if not self.topk_idx[layers, tokens].numel():
            raise ConfigError(
                f"nothing is left: there are layers 0 to {self.num_layers - 1} and tokens 0 to "
                f"{self.num_tokens - 1}"
            )
        return Trace(
            topk_idx=self.topk_idx[layers, tokens].contiguous(),
            topk_weights=self.topk_weights[layers, tokens].contiguous(),
            num_experts=self.num_experts,
            metadata=self.metadata,
        )


def read_trace_info(path: Path) -> TraceInfo:
    """Read and check a trace's header, not its content.

    Raises:
        ConfigError: Not a trace.
    """
    from safetensors import SafetensorError, safe_open

    if not is_file(path):
        raise ConfigError(f"{path}: no such file")
    try:
        with safe_open(path, "pt") as file:
            metadata = dict(file.metadata() or {})
            found = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            shapes = {name: tuple(part.get_shape()) for name, part in found.items()}
            dtypes = {name: part.get_dtype() for name, part in found.items()}
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} is not a safetensors file: {error}") from None
    missing = [name for name in _NAMES if name not in shapes]
    if missing:
        raise ConfigError(f"{path} is not a trace: it has no {' and no '.join(missing)}")
    shape = shapes["topk_idx"]
    if len(shape) != 3 or shapes["topk_weights"] != shape:
        raise ConfigError(
            f"{path} is not a trace: topk_idx {list(shape)} and topk_weights "
            f"{list(shapes['topk_weights'])} must both be [layers, tokens, top_k]"
        )
    if dtypes["topk_idx"] not in _IDX_DTYPES or dtypes["topk_weights"] not in _WEIGHT_DTYPES:
        raise ConfigError(
            f"{path} is not a trace: topk_idx {dtypes['topk_idx']} must be an integer and "
            f"topk_weights {dtypes['topk_weights']} one of {', '.join(sorted(_WEIGHT_DTYPES))}"
        )
    num_experts = metadata.pop("num_experts", "")
    if not re.fullmatch("[0-9]{1,9}", num_experts):
        raise ConfigError(f"{path}: its metadata has no num_experts; crossdock trace convert can")
    return TraceInfo(
        num_layers=shape[0],
        num_tokens=shape[1],
        top_k=shape[2],
        num_experts=int(num_experts),
        metadata=metadata,
    )


def read_trace(path: Path) -> Trace:
    """Read and check a whole trace.

    Raises:
        ConfigError: Not a trace, or one that cannot be dispatched.
    """
    from safetensors.torch import load_file

    info = read_trace_info(path)
    tensors = load_file(path)
    try:
        return Trace(
            topk_idx=tensors["topk_idx"],
            topk_weights=tensors["topk_weights"],
            num_experts=info.num_experts,
            metadata=info.metadata,
        )
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def write_trace(trace: Trace, path: Path) -> None:
    """Write a trace, ids in the narrowest integer that holds them.

    Raises:
        ConfigError: The file cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    idx = trace.topk_idx
    if int(idx.min()) >= 0 and trace.num_experts <= 256:
        idx = idx.to(torch.uint8)
    else:
        idx = idx.to(torch.int16 if trace.num_experts <= 2**15 else torch.int32)
    metadata: dict[str, Any] = dict(trace.metadata)
    metadata |= {
        "num_experts": str(trace.num_experts),
        "top_k": str(trace.top_k),
        "layers": str(trace.num_layers),
        "tokens": str(trace.num_tokens),
    }
    tensors = {"topk_idx": idx.contiguous(), "topk_weights": trace.topk_weights.contiguous()}
    try:
        save_file(tensors, path, metadata=metadata)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path}: cannot be written: {error}") from None


def is_file(path: Path) -> bool:
    """Whether a file is there; no if its name is one that no file can have."""
    try:
        return path.is_file()
    except OSError:
        return False


def _refuse(bad: Tensor, ids: Tensor, what: str) -> None:
    first = bad.nonzero()
    if len(first):
        layer, token, column = first[0].tolist()
        expert = int(ids[layer, token, column])
        raise ConfigError(
            f"layer {layer}, token {token}: expert {expert} {what} ({len(first)} such entries)"
        )
