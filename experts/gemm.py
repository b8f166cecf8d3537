"""Grouped GEMMs of torch: bf16, fp16, fp32, and CUTLASS fp8.

A grouped GEMM multiplies each run of pairs by the weights of its expert: y[p] = weight[e(p)] x[p].
The worker asks for no more than ``GroupedGemm`` says, so a new library is one class here or beside.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from crossdock.scratch import convert_rows

__all__ = ["Activations", "CutlassFp8Gemm", "GroupedGemm", "Groups", "TorchGemm"]

Activations = Literal["plain", "fp8_token", "fp8_block"]
"""What a GEMM reads: rows in its dtype, or e4m3 with one fp32 scale a row or for each 128."""


class Groups:
    """Which pairs belong to which expert, in the two forms that libraries ask for.

    Attributes:
        offsets: int64 [E_local + 1]; the pairs of expert e are ``offsets[e]:offsets[e + 1]``.
    """

    def __init__(self, offsets: Tensor) -> None:
        self.offsets = offsets

    @cached_property
    def ends(self) -> Tensor:
        """int32 [E_local]: where each expert's pairs end."""
        return self.offsets[1:].to(torch.int32)


class GroupedGemm(ABC):
    """The GEMM of one of the two weights of all local experts.

    Attributes:
        name: The backend's name.
        writes_out: It writes where it is told; otherwise its output comes from torch's allocator.
        activations: What it reads.
        dtype: Of its output, and of plain activations.
    """

    name: ClassVar[str]
    writes_out: ClassVar[bool]
    activations: Activations
    dtype: torch.dtype

    @abstractmethod
    def load(self, weight: Tensor, scale: Tensor | None) -> None:
        """Overwrites the weights in place.

        Args:
            weight: [E_local, N, K], plain or as quantised as this GEMM multiplies it.
            scale: fp32 factors of a quantised ``weight``.
        """

    @abstractmethod
    def __call__(
        self, x: Tensor, scale: Tensor | None, groups: Groups, *, out: Tensor | None = None
    ) -> Tensor:
        """[P, N] for ``x`` [P, K]; pairs past ``groups.offsets[-1]`` are unspecified.

        Args:
            x: In ``dtype``, or float8_e4m3fn.
            scale: fp32 [P, 1] or [P, K / 128] of fp8 activations, else None.
            groups: The pairs of each expert.
            out: [P, N] if ``writes_out``, else None.
        """

    def why_not_captured(self) -> str | None:
        """Why a CUDA graph cannot hold this GEMM; None where it can."""
        return None


class TorchGemm(GroupedGemm):
    """``torch.nn.functional.grouped_mm``, on CPU and CUDA, in the dtype of the weights."""

    name = "torch"
    writes_out = False
    activations: Activations = "plain"

    def __init__(self, weight: Tensor, scale: Tensor | None) -> None:
        assert scale is None
        self.dtype = weight.dtype
        self._weight = weight

    def load(self, weight: Tensor, scale: Tensor | None) -> None:
        """See ``GroupedGemm``."""
        self._weight.copy_(weight)

    def __call__(
        self, x: Tensor, scale: Tensor | None, groups: Groups, *, out: Tensor | None = None
    ) -> Tensor:
        """See ``GroupedGemm``."""
        return F.grouped_mm(x, self._weight.transpose(1, 2), offs=groups.ends)

    def why_not_captured(self) -> str | None:
        """See ``GroupedGemm``."""
        major, minor = torch.cuda.get_device_capability(self._weight.device)
        if self.dtype == torch.bfloat16 and major in (9, 10):
            return None
        return (
            f"torch's grouped_mm reads the offsets on the host in {self.dtype} on SM "
            f"{major}.{minor}; it does not for torch.bfloat16 on SM 9.0 and 10.x"
        )


class CutlassFp8Gemm(GroupedGemm):
    """``torch.nn.functional.scaled_grouped_mm``: CUTLASS inside, one scale a row on either side.

    The weight's rows are its output channels. Output is bf16, from torch's allocator.
    """

    name = "cutlass_fp8"
    writes_out = False
    activations: Activations = "fp8_token"
    dtype = torch.bfloat16

    def __init__(self, weight: Tensor, scale: Tensor | None) -> None:
        self._weight = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
        self._scale = torch.empty(weight.shape[:2], dtype=torch.float32, device=weight.device)
        self.load(weight, scale)

    def load(self, weight: Tensor, scale: Tensor | None) -> None:
        """See ``GroupedGemm``."""
        if scale is None:
            for expert in range(weight.shape[0]):  # at load; one in fp32 at a time
                channel_scale = self._scale[expert].unsqueeze(1)
                convert_rows(weight[expert], out=self._weight[expert], scale=channel_scale)
        else:
            self._weight.copy_(weight)
            self._scale.copy_(scale)

    def __call__(
        self, x: Tensor, scale: Tensor | None, groups: Groups, *, out: Tensor | None = None
    ) -> Tensor:
        """See ``GroupedGemm``."""
        assert scale is not None
        y: Tensor = F.scaled_grouped_mm(  # type: ignore[attr-defined]  # torch's stub lacks it
            x,
            self._weight.transpose(1, 2),
            scale.view(-1),
            F.ScalingType.RowWise,
            self._scale,
            F.ScalingType.RowWise,
            offs=groups.ends,
            output_dtype=torch.bfloat16,
        )
        return y
