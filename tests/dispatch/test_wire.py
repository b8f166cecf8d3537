"""The fp8 wire: one fp32 scale per 128 elements, within e4m3's rounding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from crossdock.dispatch.transports.base import Transport
from crossdock.dispatch.wire import quantize
from tests.dispatch.cases import Case, Step, all_steps, copy_rows, simple_case
from tests.dispatch.oracle import assert_same_bits, check_quantised


def send_these(transport: Transport, case: Case, x: Tensor) -> Step:
    """Rank 0 sends ``x``; every token goes to expert 0."""
    batch = case.batch(0, transport.rank)
    mine = x if transport.rank == 0 else batch.x
    with case.dispatcher(transport) as dispatcher:
        rows, handle = dispatcher.dispatch(
            mine.to(transport.device),
            batch.topk_idx.to(transport.device),
            batch.topk_weights.to(transport.device),
        )
        seen = copy_rows(rows)
        dispatcher.combine(rows.y, handle)
        return seen


def hard_rows(hidden: int, dtype: torch.dtype) -> Tensor:
    """Rows in which a careless quantiser divides by zero, overflows or flushes."""
    noise = torch.randn(8, hidden, generator=torch.Generator().manual_seed(5))
    largest = torch.finfo(dtype).max
    noise[0] = 0
    noise[1] = 0
    noise[1, 0] = 1.0
    noise[2] *= 1e-30
    noise[3] = -largest
    noise[4, :] = torch.linspace(-448, 448, hidden)
    noise[5] = 448.0
    noise[6] = 1e-3
    noise[6, -1] = 1e3
    return noise.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("hidden", [1, 127, 128, 129, 300])
def test_hard_rows_stay_within_the_bound(local, hidden, dtype):
    x = hard_rows(hidden, dtype)
    case = simple_case(
        [(8, 0)], hidden=hidden, top_k=1, routing="one expert", wire="fp8", dtype=dtype
    )
    seen = local(2, send_these, case, x)[0]
    assert seen.num_rows == 8
    assert not seen.x.float().isnan().any()
    assert not seen.scale.isnan().any()
    check_quantised(seen.x, seen.scale, x)


def test_zero_rows_stay_zero(local):
    case = simple_case([(3, 0)], hidden=200, top_k=1, routing="one expert", wire="fp8")
    seen = local(2, send_these, case, torch.zeros(3, 200, dtype=torch.bfloat16))[0]
    assert torch.equal(
        seen.x.float() * seen.scale.repeat_interleave(128, 1)[:, :200], torch.zeros(3, 200)
    )


def test_a_token_is_quantised_once_for_all_its_ranks(ranks):
    case = simple_case([(9, 9)], num_experts=4, top_k=4, unrouted=0.0, hidden=136, wire="fp8")
    (on_first,), (on_second,) = ranks(2, all_steps, case)
    assert torch.equal(on_first.source, on_second.source)
    assert_same_bits(on_first.x, on_second.x)
    assert_same_bits(on_first.scale, on_second.scale)


def test_both_algorithms_send_the_same_fp8_bytes(local):
    seen = []
    for algorithm in ("alltoall", "allgather"):
        case = simple_case(
            [(9, 9)],
            num_experts=4,
            top_k=4,
            unrouted=0.0,
            hidden=136,
            wire="fp8",
            algorithm=algorithm,
        )
        seen.append(local(2, all_steps, case)[0][0])
    assert_same_bits(seen[0].x, seen[1].x)
    assert_same_bits(seen[0].scale, seen[1].scale)


@pytest.mark.gpu
def test_a_gpu_quantises_to_the_same_bits():
    x = torch.randn(4096, 1000, generator=torch.Generator().manual_seed(6)).bfloat16()
    for seen, expected in zip(quantize(x.cuda()), quantize(x), strict=True):
        assert_same_bits(seen.cpu(), expected)


def strides(transport: Transport, case: Case) -> list[tuple[tuple[int, ...], int]]:
    with case.dispatcher(transport) as dispatcher:
        rows, handle = dispatcher.dispatch(*case.batch(0, transport.rank).to(transport.device))
        dispatcher.combine(rows.y, handle)
        return [rows.x.stride(), rows.x.element_size(), rows.x.data_ptr()]


@pytest.mark.parametrize("wire", ["payload", "fp8"])
@pytest.mark.parametrize("hidden", [1, 8, 129, 2048])
def test_rows_start_at_multiples_of_16_bytes(ranks, hidden, wire):
    case = simple_case([(5, 5)], hidden=hidden, wire=wire)
    for stride, element_size, address in ranks(2, strides, case):
        assert stride[1] == 1
        assert stride[0] * element_size % 16 == 0 or stride[0] == hidden
        assert address % 16 == 0
