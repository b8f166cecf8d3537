"""Every kernel once, on small cases, under compute-sanitizer or not.

``python -m tests.scratch.every_kernel``

Equality is tested elsewhere; here only what must be written is read, so that each tool sees all
accesses and nothing else.
"""

from __future__ import annotations

import itertools

import torch

from crossdock.scratch import (
    WorkspaceManager,
    convert_rows,
    permute,
    permute_scratch,
    swiglu,
    unpermute,
)

FP8 = torch.float8_e4m3fn


def rows_of(num_rows: int, hidden: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [C, H] and scales [C, ceil(H / 128)] of which an fp8 payload makes use."""
    values = torch.randn(num_rows, hidden, device="cuda")
    return values.to(dtype), torch.rand(num_rows, -(-hidden // 128), device="cuda") + 0.5


def permute_and_back(num_rows: int, top_k: int, experts: int, hidden: int, dtype: torch.dtype):
    topk_idx = torch.rand(num_rows, 2 * experts, device="cuda").argsort(1)[:, :top_k]
    topk_idx[topk_idx >= experts] = -1
    num_pairs = int((topk_idx >= 0).sum())
    x, scale = rows_of(num_rows, hidden, dtype)
    scratch = permute_scratch(
        WorkspaceManager("cuda"),
        num_experts=2 * experts,
        num_local_experts=experts,
        device="cuda",
    )
    valid = torch.tensor([num_rows], device="cuda")
    for count in (num_rows, valid):
        permuted = permute(
            x,
            scale if dtype == FP8 else None,
            topk_idx,
            scratch,
            num_pairs=num_pairs,
            num_rows=count,
        )
        assert int(permuted.offsets[-1]) == num_pairs
        if dtype != FP8:
            out = torch.empty_like(x)
            weights = torch.rand(num_rows, top_k, device="cuda")
            unpermute(out, permuted.hidden, weights, permuted)
            assert out.isfinite().all()
    if dtype == torch.bfloat16:
        fp8 = torch.empty(num_pairs, hidden, dtype=FP8, device="cuda")
        for width in {1, scale.shape[1]}:
            scales = torch.empty(num_pairs, width, device="cuda")
            permute(x, None, topk_idx, scratch, num_pairs=num_pairs, out=fp8, out_scale=scales)
            assert scales.isfinite().all()
    if dtype == FP8:
        wide = torch.empty(num_pairs, hidden, dtype=torch.bfloat16, device="cuda")
        permute(x, scale, topk_idx, scratch, num_pairs=num_pairs, out=wide)
        assert wide.isfinite().all()


def convert(rows: int, width: int, dtype: torch.dtype) -> None:
    gate_up = torch.randn(rows, 2 * width, device="cuda").to(dtype)
    plain = torch.empty(rows, width, dtype=dtype, device="cuda")
    assert swiglu(gate_up, out=plain).isfinite().all()
    fp8 = torch.empty(rows, width, dtype=FP8, device="cuda")
    for scales in {1, -(-width // 128)}:
        scale = torch.empty(rows, scales, device="cuda")
        swiglu(gate_up, out=fp8, scale=scale)
        convert_rows(plain, out=fp8, scale=scale)
        assert scale.isfinite().all()


def main() -> None:
    torch.manual_seed(0)
    for hidden, dtype in itertools.product(
        (129, 1024), (torch.bfloat16, torch.float16, torch.float32, FP8)
    ):
        for num_rows, experts in ((33, 8), (1500, 40)):
            permute_and_back(num_rows, 4, experts, hidden, dtype)
    for width, dtype in itertools.product((129, 512), (torch.bfloat16, torch.float32)):
        convert(40, width, dtype)
    torch.cuda.synchronize()
    print("every kernel ran")  # noqa: T201


if __name__ == "__main__":
    main()
