"""What is wrong on this rank, as problems that agreement carries to every rank."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from crossdock.dispatch.agreement import Problem, ProblemKind
from crossdock.dispatch.config import DTYPES, DispatchConfig
from crossdock.dispatch.handle import Handle
from crossdock.dispatch.placement import ExpertPlacement
from crossdock.dispatch.topology import Topology
from crossdock.dispatch.transports.base import Transport, in_words

__all__ = [
    "Attempt",
    "check_hidden_states",
    "check_out",
    "check_results",
    "check_tokens",
    "find_handle_problem",
    "find_misfit",
    "find_shortage",
]

logger = logging.getLogger(__name__)

_NO_GRAD = (
    "requires grad, but dispatch and combine have no backward yet: call them under "
    "torch.no_grad() or on .detach()ed tensors"
)


_ID_DTYPES, _WEIGHT_DTYPES = (torch.int64, torch.int32), (torch.float32,)


class Attempt:
    """A ``with`` block that takes memory, and turns its failure into a problem for agreement.

    Args:
        purpose: What the memory is for, with its size where that is known.
    """

    def __init__(self, purpose: str) -> None:
        self._purpose = purpose
        self.problem: Problem | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if error is not None:
            self.problem = find_shortage(self._purpose, error)
        return self.problem is not None


def find_shortage(purpose: str, error: BaseException) -> Problem | None:
    """The problem that an exception means for agreement, if it is that memory was short.

    Args:
        purpose: What the memory was for, with its size where that is known.
        error: Whatever was raised.
    """
    if not _is_out_of_memory(error):
        return None
    logger.warning("no %s", purpose, exc_info=error)
    return Problem(ProblemKind.CAPACITY, f"no {purpose}: {in_words(error)}")


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    # The CPU allocator has no class of its own.
    return isinstance(error, RuntimeError) and "alloc" in str(error)


def check_hidden_states(
    x: Tensor, config: DispatchConfig, device: torch.device, num_tokens: int
) -> Problem | None:
    """Hidden states [T, H] of the config's dtype on the transport's device, without grad."""
    return _check("x", x, num_tokens, config.hidden, (config.dtype,), device)


def check_tokens(
    x: Tensor,
    topk_idx: Tensor | None,
    topk_weights: Tensor | None,
    config: DispatchConfig,
    device: torch.device,
) -> Problem | None:
    """Hidden states, with ids int32 or int64 [T, K] and weights fp32 [T, K] of as many tokens."""
    problem = _check("x", x, None, config.hidden, (config.dtype,), device)
    if problem is not None:
        return problem
    rows, columns = x.shape[0], config.top_k
    return _check("topk_idx", topk_idx, rows, columns, _ID_DTYPES, device) or _check(
        "topk_weights", topk_weights, rows, columns, _WEIGHT_DTYPES, device
    )


def check_results(
    y: Tensor, capacity: int, config: DispatchConfig, device: torch.device
) -> Problem | None:
    """Results must be [C, H] of a model dtype on the transport's device, without grad."""
    return _check("y", y, capacity, config.hidden, DTYPES, device)


def check_out(
    out: Tensor,
    num_tokens: int,
    config: DispatchConfig,
    device: torch.device,
    results: Tensor | None,
) -> Problem | None:
    """An ``out`` tensor must be [T, H] of the config's dtype on the transport's device.

    Nor may it lie where other ranks read ``results`` [C, H], if they do.
    """
    problem = _check("out", out, num_tokens, config.hidden, (config.dtype,), device)
    if problem is None and any(
        n > 1 and step == 0 for n, step in zip(out.shape, out.stride(), strict=True)
    ):
        return _routing("out is expanded, so its rows share memory: a tensor of its own is wanted")
    if problem is None and results is not None and _overlap(out, results):
        return _routing(
            "out lies in rows.y, where other ranks still read: a tensor of its own is wanted"
        )
    return problem


def _overlap(first: Tensor, second: Tensor) -> bool:
    """Whether the stretches of memory from the first element to the last do, of two [n, m]."""
    begins, ends = [], []
    for tensor in (first, second):
        if tensor.numel() == 0:
            return False
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        begins.append(tensor.data_ptr())
        ends.append(tensor.data_ptr() + (last + 1) * tensor.itemsize)
    return max(begins) < min(ends)


def _check(
    name: str,
    value: object,
    rows: int | None,
    columns: int,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> Problem | None:
    """What is wrong with a tensor [rows, columns]; any number of rows will do if it is None."""
    if not isinstance(value, Tensor):
        wanted = _shape(rows, columns)
        return _routing(f"{name} is a {type(value).__name__}: a tensor {wanted} is wanted")
    if value.requires_grad and torch.is_grad_enabled():
        return Problem(ProblemKind.GRADIENT, f"{name} {_NO_GRAD}")
    if value.is_nested:  # it has no shape that could be told
        return _routing(f"{name} is a nested tensor: a dense one is wanted")
    shape = value.shape
    if len(shape) != 2:
        return _wrong_shape(name, value, rows, columns)
    if value.dtype not in dtypes:
        wanted = " or ".join(map(str, dtypes))
        return _routing(f"{name} has dtype {value.dtype}: {wanted} is wanted")
    if value.layout != torch.strided:
        return _routing(f"{name} is a {value.layout} tensor: a dense one is wanted")
    if value.device != device:
        return _routing(f"{name} is on {value.device}: this transport's rows live on {device}")
    num_rows, num_columns = shape
    if num_columns != columns or (rows is not None and rows != num_rows):
        return _wrong_shape(name, value, rows, columns)
    return None


def _shape(rows: int | None, columns: int) -> str:
    return f"[{'T' if rows is None else rows}, {columns}]"


def _wrong_shape(name: str, value: Tensor, rows: int | None, columns: int) -> Problem:
    wanted = _shape(rows, columns)
    return _routing(f"{name} has shape {list(value.shape)}: {wanted} is wanted")


def _routing(text: str) -> Problem:
    return Problem(ProblemKind.ROUTING, text)


def find_misfit(
    config: DispatchConfig,
    topology: Topology,
    placement: ExpertPlacement,
    transport: Transport,
    num_slots: int,
) -> Problem | None:
    """Settings of a dispatcher that do not fit together, or not with its transport."""
    ranks = transport.world_size
    text = None
    if topology.world_size != ranks:
        text = f"topology has {topology.world_size} ranks, the transport {ranks}"
    elif placement.ep_size != ranks:
        text = f"placement is for {placement.ep_size} ranks, the transport has {ranks}"
    elif placement.num_experts != config.num_experts:
        text = f"placement has {placement.num_experts} experts, num_experts = {config.num_experts}"
    elif isinstance(num_slots, bool) or not isinstance(num_slots, int) or num_slots < 1:
        text = f"num_slots = {num_slots!r}: a whole number above 0"
    elif config.hidden % transport.hidden_multiple:
        text = (
            f"hidden = {config.hidden}: {transport.name} moves rows of a multiple of "
            f"{transport.hidden_multiple} elements; nccl moves any"
        )
    elif config.layout not in transport.layouts:
        text = (
            f"layout = 'expert' is not built over {transport.name} here: it takes nvshmem among "
            "ranks that have addresses for each other's memory; use layout = 'row'"
        )
    elif config.layout == "expert" and config.algorithm == "allgather":
        text = "layout = 'expert' sends tokens to their experts only: use algorithm = 'alltoall'"
    return None if text is None else Problem(ProblemKind.CONFIG, text)


def find_handle_problem(
    handle: object,
    call: str,
    *,
    dispatcher: int,
    transport: Transport,
    era: int,
    captured: bool,
) -> Problem | None:
    """Why a handle cannot be used by this dispatcher now.

    Args:
        handle: What the caller gave.
        call: What it was given to.
        dispatcher: Number of the dispatcher.
        transport: Of the dispatcher.
        era: Its current one.
        captured: Whether a graph is being captured.
    """
    text = None
    if not isinstance(handle, Handle):
        text = f"{type(handle).__name__} is no handle: take it from dispatch"
    elif handle.dispatcher != dispatcher or handle.transport is not transport:
        text = f"the handle of step {handle.step} is another dispatcher's"
    elif handle.era != era:
        text = f"the handle of step {handle.step} is stale: unlock() came after it"
    elif handle.captured != captured:
        made = "recorded in a graph" if handle.captured else "made outside of the graph"
        text = f"the handle of step {handle.step} was {made}"
    return None if text is None else Problem(ProblemKind.HANDLE, f"{call}: {text}")
