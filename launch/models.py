"""The keys of a configuration file, their types and their ranges, one model a section.

Only what a section can know by itself is checked here; what several sections must agree on is in
``crossdock.launch.config``. The JSON schema that editors use is generated from these models.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from crossdock.dispatch.config import LEAST_TIMEOUT_S
from crossdock.dispatch.nvshmem.heap import SIZE_PATTERN, parse_size
from crossdock.scratch.errors import ConfigError

__all__ = [
    "BatchSection",
    "ClusterSection",
    "Config",
    "DispatchSection",
    "ExpertsSection",
    "LinksSection",
    "MoeSection",
    "ParallelSection",
    "RoutingSection",
    "RunSection",
]

Count = Annotated[int, Field(ge=0, lt=2**31)]
Positive = Annotated[int, Field(ge=1, lt=2**31)]


def _size(value: Any) -> int:
    try:
        return parse_size(value)
    except ConfigError as error:
        raise PydanticCustomError("size", "{wanted}", {"wanted": str(error)}) from None


Size = Annotated[
    int,
    BeforeValidator(_size),
    WithJsonSchema(
        {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": SIZE_PATTERN}]}
    ),
]
"""Bytes, or text such as 8GiB."""


class _Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class ClusterSection(_Section):
    """The machines: nodes of equally many ranks each, one rank a GPU (or a share of the CPU)."""

    nodes: Positive = 1
    """Machines."""
    ranks_per_node: Positive
    """Ranks on each node; node i holds ranks i * ranks_per_node and following."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where tokens, weights and buffers live."""

    @property
    def num_ranks(self) -> int:
        """Ranks of the EP group."""
        return self.nodes * self.ranks_per_node


class ParallelSection(_Section):
    """The attention side's grid; dp * pcp * tp must be the number of ranks."""

    dp: Positive = 1
    """Data parallel: ranks with batches of their own. The slowest axis."""
    pcp: Positive = 1
    """Prefill context parallel: ranks that share the sequences of one batch."""
    tp: Positive = 1
    """Tensor parallel: ranks that hold the same tokens. The fastest axis."""
    sequence_parallel: bool = False
    """Each tp rank dispatches its slice of the tokens; otherwise tp rank 0 dispatches all."""


class MoeSection(_Section):
    """The layer."""

    num_experts: Positive
    """E, over all ranks."""
    top_k: Annotated[int, Field(ge=1, le=64)]
    """K, experts of a token."""
    hidden: Positive
    """H, elements of a token's hidden state."""
    intermediate: Positive
    """I, elements between an expert's two matrices."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Of tokens, weights and results."""
    placement: Literal["linear", "round_robin"] | list[Count] = "linear"
    """Which rank owns which expert; a list names the owner of every expert."""


class DispatchSection(_Section):
    """How rows travel."""

    transport: Literal["auto", "gloo", "nccl", "mpi", "shm", "nvshmem", "hierarchical"] = "auto"
    """What moves the bytes."""
    algorithm: Literal["alltoall", "allgather"] = "alltoall"
    """Send a token to the ranks that own its experts, or every token to every rank."""
    wire: Literal["payload", "fp8"] = "payload"
    """Move the dtype as it is, or e4m3 with one fp32 scale for each 128 elements."""
    bucket: Literal["grow"] | Positive = "grow"
    """Receive bucket: grow by powers of two, or this many rows once and for all."""
    layout: Literal["row", "expert"] = "row"
    """Rows in source order, or one a pair, grouped by expert (needs transport nvshmem)."""
    expert_alignment: Annotated[int, Field(ge=1, le=1024)] = 1
    """With layout expert: rows of which each expert's first is a multiple."""
    num_sms: Positive | None = None
    """GPU multiprocessors that dispatch and combine may occupy; null: all."""
    timeout_s: Annotated[float, Field(ge=LEAST_TIMEOUT_S, lt=1e6)] = 100.0
    """Seconds after which a rank that did not answer is given up."""
    symmetric_heap: Size | None = None
    """Of nvshmem: memory taken at the start, in bytes or as 8GiB; null: it grows with buckets."""
    debug: bool = False
    """Fill unused memory with NaN, so that whatever reads it is found out."""


class ExpertsSection(_Section):
    """Who computes."""

    backend: Literal["auto", "torch", "cutlass_fp8", "humming"] = "auto"
    """Grouped GEMM of the experts."""


class LinksSection(_Section):
    """Speeds that ``crossdock plan`` reckons times with; nothing else reads them."""

    intra_node_gb_s: Annotated[float, Field(gt=0)] | None = None
    """GB/s in each direction between a rank and the others of its node."""
    inter_node_gb_s: Annotated[float, Field(gt=0)] | None = None
    """GB/s in each direction between a rank and other nodes: a node's, shared by its ranks."""
    latency_us: Annotated[float, Field(ge=0)] = 0.0
    """Microseconds of one exchange between all ranks, however small."""


class BatchSection(_Section):
    """What every step computes: sequences per DP rank, or plainly tokens per rank."""

    prefill: list[list[Count]] | None = None
    """Lengths of the prefill sequences of each DP rank, in tokens."""
    decode: list[Count] | None = None
    """Decode tokens of each DP rank."""
    tokens_per_rank: list[Count] | None = None
    """Instead of both: tokens that each rank dispatches, none of them on two ranks."""


class RoutingSection(_Section):
    """Which experts the tokens choose: one of trace, zipf, uniform."""

    trace: str | None = None
    """Recorded choices: a file beside this one or in traces/ beside it."""
    layer: Count = 0
    """First layer of the trace; each time all its tokens were used the next layer follows."""
    zipf: Annotated[float, Field(ge=0, le=100)] | None = None
    """Popularity of the i-th most popular expert falls as i ** -zipf."""
    uniform: Literal[True] | None = None
    """All experts are equally popular."""


class RunSection(_Section):
    """What the main job does."""

    steps: Positive = 10
    """Steps of the layer."""
    lock_after: Count | None = None
    """Steps after which memory is locked and may no longer grow; null: never."""
    batch: BatchSection
    """Tokens of a step."""
    routing: RoutingSection
    """Experts of the tokens."""
    seed: Count = 0
    """Of tokens, weights and synthetic routing."""


class Config(_Section):
    """A Crossdock job: cluster, layer, dispatch and what to run."""

    version: Literal[1]
    """Of this format."""
    name: Annotated[str, Field(min_length=1)]
    """What reports call the job."""
    cluster: ClusterSection
    """Machines and ranks."""
    parallel: ParallelSection = ParallelSection()
    """Grid of the attention side."""
    moe: MoeSection
    """The layer."""
    dispatch: DispatchSection = DispatchSection()
    """How rows travel."""
    experts: ExpertsSection = ExpertsSection()
    """Who computes."""
    links: LinksSection = LinksSection()
    """How fast the machines' links are."""
    run: RunSection
    """The main job."""
