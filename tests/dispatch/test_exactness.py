"""What arrives is what was sent, in the promised order; what comes back is the oracle's sum."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from crossdock.dispatch import connect
from crossdock.dispatch.transports.base import Transport
from tests.dispatch.cases import (
    Case,
    Step,
    all_steps,
    attempt,
    copy_rows,
    fill_results,
    finish_step,
    linear_owner,
    one_step,
    simple_case,
)
from tests.dispatch.oracle import (
    assert_same_bits,
    check_step,
    check_steps,
    expected_rows,
    num_choices,
)

ALGORITHMS = ["alltoall", "allgather"]
WIRES = ["payload", "fp8"]
TOKENS = [(33, 0, 17, 64), (5, 70, 0, 1), (0, 0, 0, 0), (12, 12, 12, 12)]


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_rows_and_sums_are_exact(ranks, algorithm, wire):
    case = simple_case(TOKENS, num_experts=10, top_k=4, hidden=136, algorithm=algorithm, wire=wire)
    check_steps(case, ranks(4, all_steps, case))


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_steps_of_many_megabytes_are_exact(ranks, algorithm, wire):
    """Whatever works through rows block by block must get the seams right."""
    case = simple_case(
        [(1500, 0, 701), (3, 1999, 0)], hidden=1025, top_k=2, algorithm=algorithm, wire=wire
    )
    check_steps(case, ranks(3, all_steps, case))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_many_narrow_rows_are_exact(ranks, algorithm):
    case = simple_case([(70_000, 1, 0)], hidden=3, top_k=2, algorithm=algorithm)
    check_steps(case, ranks(3, all_steps, case))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_dtype_is_exact(ranks, algorithm, dtype):
    case = simple_case(TOKENS, num_experts=10, top_k=8, algorithm=algorithm, dtype=dtype)
    check_steps(case, ranks(4, all_steps, case))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_combine_gives_the_same_bits_every_time(ranks, algorithm):
    case = simple_case([(40, 41, 42, 43)] * 2, top_k=8, dtype=torch.float32, algorithm=algorithm)
    first, second = (ranks(4, all_steps, case) for _ in range(2))
    for steps, again in zip(first, second, strict=True):
        for step, same in zip(steps, again, strict=True):
            assert_same_bits(step.out, same.out)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_choice_is_exactly_one_pair(ranks, algorithm):
    case = simple_case([(9, 8, 7, 6)], algorithm=algorithm)
    seen = ranks(4, all_steps, case)
    assert sum(steps[0].num_pairs for steps in seen) == num_choices(case, 0)


def test_alltoall_sends_a_token_once_to_a_rank_however_many_experts_it_has_there(ranks):
    case = simple_case([(6, 6)], num_experts=4, top_k=4, unrouted=0.0)
    seen = ranks(2, all_steps, case)
    assert [steps[0].num_rows for steps in seen] == [12, 12]
    assert [steps[0].num_pairs for steps in seen] == [24, 24]


def test_allgather_sends_every_token_everywhere(ranks):
    case = simple_case([(6, 0, 3)], top_k=1, algorithm="allgather")
    seen = ranks(3, all_steps, case)
    assert [steps[0].num_rows for steps in seen] == [9, 9, 9]


def odd_payload(transport: Transport, wire_dtype: torch.dtype) -> Step:
    """NaNs with a message, infinities, -0 and subnormals."""
    case = simple_case([(4, 4)], hidden=8, top_k=1, unrouted=0.0, dtype=wire_dtype)
    batch = case.batch(0, transport.rank)
    batch.x.view(torch.int16)[:, :6] = torch.tensor(
        [0x7FA1, 0x7FC5, -1, -0x8000, 0x0001, 0x7F80], dtype=torch.int16
    )
    with case.dispatcher(transport) as dispatcher:
        rows, handle = dispatcher.dispatch(*batch.to(transport.device))
        seen = copy_rows(rows)
        dispatcher.combine(rows.y, handle)
        return seen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_payload_bits_survive_whatever_they_mean(ranks, dtype):
    sent = torch.tensor([0x7FA1, 0x7FC5, -1, -0x8000, 0x0001, 0x7F80], dtype=torch.int16)
    seen = ranks(2, odd_payload, dtype)
    assert sum(step.num_rows for step in seen) == 8
    for step in seen:
        assert (step.x.view(torch.int16)[:, :6] == sent).all()


def scattered_inputs(transport: Transport) -> Step:
    """The same values as the case's, in views that are not contiguous."""
    case = simple_case([(20, 20)], idx_dtype=torch.int32)
    x, topk_idx, topk_weights = case.batch(0, transport.rank).to(transport.device)
    wide = torch.zeros(20, 2 * x.shape[1], dtype=x.dtype, device=x.device)
    wide[:, ::2] = x
    with case.dispatcher(transport) as dispatcher:
        rows, handle = dispatcher.dispatch(
            wide[:, ::2], topk_idx.t().contiguous().t(), topk_weights.t().contiguous().t()
        )
        seen = copy_rows(rows)
        fill_results(case, 0, transport.rank, rows)
        y = torch.empty(rows.y.shape[1], rows.y.shape[0], dtype=x.dtype, device=x.device).t()
        y.copy_(rows.y)
        seen.out = dispatcher.combine(y, handle).cpu().clone()
        return seen


def test_inputs_need_not_be_contiguous(ranks):
    case = simple_case([(20, 20)], idx_dtype=torch.int32)
    for rank, step in enumerate(ranks(2, scattered_inputs)):
        check_step(case, 0, rank, step)


def inputs_reused(transport: Transport) -> Step:
    """The caller's tensors are the caller's again as soon as dispatch returns."""
    case = simple_case([(20, 20)])
    x, topk_idx, topk_weights = case.batch(0, transport.rank).to(transport.device)
    with case.dispatcher(transport) as dispatcher:
        rows, handle = dispatcher.dispatch(x, topk_idx, topk_weights)
        x.fill_(7)
        topk_idx.fill_(0)
        topk_weights.fill_(0.5)
        return finish_step(dispatcher, case, 0, rows, handle)


def test_inputs_may_be_overwritten_after_dispatch(ranks):
    case = simple_case([(20, 20)])
    for rank, step in enumerate(ranks(2, inputs_reused)):
        check_step(case, 0, rank, step)


def out_kept_and_given(transport: Transport, case: Case) -> list:
    with case.dispatcher(transport) as dispatcher:
        first = one_step(dispatcher, transport, case, 0)
        rows, handle = dispatcher.dispatch(*case.batch(1, transport.rank).to(transport.device))
        fill_results(case, 1, transport.rank, rows)
        given = torch.full(
            (case.tokens[1][transport.rank], case.config.hidden),
            float("nan"),
            dtype=case.config.dtype,
            device=transport.device,
        )
        returned = dispatcher.combine(rows.y, handle, out=given)
        second = copy_rows(rows)
        second.out = given.cpu().clone()
        return [first, second, returned.data_ptr() == given.data_ptr()]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_combine_writes_into_out_where_one_is_given(ranks, algorithm):
    case = simple_case([(10, 10), (7, 30)], algorithm=algorithm)
    for rank, (first, second, same) in enumerate(ranks(2, out_kept_and_given, case)):
        assert same
        check_step(case, 0, rank, first)
        check_step(case, 1, rank, second)


def results_elsewhere(transport: Transport, case: Case) -> Step:
    with case.dispatcher(transport) as dispatcher:
        rows, handle = dispatcher.dispatch(*case.batch(0, transport.rank).to(transport.device))
        seen = copy_rows(rows)
        fill_results(case, 0, transport.rank, rows)
        elsewhere = rows.y.clone()
        rows.y.fill_(float("nan"))
        seen.out = dispatcher.combine(elsewhere, handle).cpu().clone()
        return seen


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_results_may_be_in_any_tensor_of_y_shape(ranks, algorithm):
    case = simple_case([(10, 11)], algorithm=algorithm)
    for rank, step in enumerate(ranks(2, results_elsewhere, case)):
        check_step(case, 0, rank, step)


def in_two_halves(transport: Transport, case: Case) -> Step:
    with case.dispatcher(transport) as dispatcher:
        batch = case.batch(0, transport.rank)
        rows, handle = dispatcher.dispatch_send(*batch.to(transport.device)).wait()
        seen = copy_rows(rows)
        fill_results(case, 0, transport.rank, rows)
        seen.out = dispatcher.combine_send(rows.y, handle).wait().cpu().clone()
        return seen


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_send_and_wait_are_the_same_step_in_two_halves(ranks, algorithm):
    case = simple_case([(10, 11)], algorithm=algorithm)
    for rank, step in enumerate(ranks(2, in_two_halves, case)):
        check_step(case, 0, rank, step)


def two_on_their_way(transport: Transport, case: Case) -> list[Step]:
    """Both steps leave before either is waited for; rank 1 waits in the other order."""
    order = (1, 0) if transport.rank == 1 else (0, 1)
    with case.dispatcher(transport, num_slots=2) as dispatcher:
        sent = [
            dispatcher.dispatch_send(*case.batch(step, transport.rank).to(transport.device))
            for step in (0, 1)
        ]
        landed = {step: sent[step].wait() for step in order}
        seen = {step: copy_rows(landed[step][0]) for step in order}
        for step in order:
            fill_results(case, step, transport.rank, landed[step][0])
        back = [dispatcher.combine_send(landed[s][0].y, landed[s][1]) for s in (0, 1)]
        for step in order:
            seen[step].out = back[step].wait().cpu().clone()
        return [seen[0], seen[1]]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_two_steps_may_be_on_their_way_at_once(ranks, algorithm):
    case = simple_case([(10, 11, 0), (3, 20, 7)], algorithm=algorithm)
    check_steps(case, ranks(3, two_on_their_way, case))


def wide_results(transport: Transport, case: Case) -> Step:
    """The experts answer in fp32, with digits that the model's dtype does not hold."""
    with case.dispatcher(transport) as dispatcher:
        rows, handle = dispatcher.dispatch(*case.batch(0, transport.rank).to(transport.device))
        seen = copy_rows(rows)
        y = torch.full(rows.y.shape, float("nan"), dtype=torch.float32)
        y[: rows.num_rows] = case.results(0, transport.rank, rows.num_rows).float() + 2**-12
        seen.out = dispatcher.combine(y.to(transport.device), handle).cpu().clone()
        return seen


def test_results_travel_in_their_own_dtype_and_are_rounded_once(ranks):
    case = simple_case([(10, 11, 12)], top_k=8, unrouted=0.0)
    for rank, step in enumerate(ranks(3, wide_results, case)):
        total = torch.zeros(case.tokens[0][rank], case.config.hidden)
        for expert_rank in range(3):
            source = expected_rows(case, 0, expert_rank).source
            y = case.results(0, expert_rank, len(source)).float() + 2**-12
            mine = source[:, 0] == rank
            total[source[mine, 1]] += y[mine]
        assert torch.equal(step.out, total.to(torch.bfloat16))


def test_both_algorithms_give_the_same_results_where_experts_are_the_same(local):
    """Row by row: the experts must not notice which algorithm fed them."""
    by_algorithm = []
    for algorithm in ALGORITHMS:
        case = simple_case([(13, 0, 21)], top_k=2, algorithm=algorithm)
        found = {}
        for rank, (step,) in enumerate(local(3, all_steps, case)):
            routed = (step.topk_idx >= 0).any(dim=1)
            for source, x, ids, weights in zip(
                step.source[routed].tolist(),
                step.x[routed],
                step.topk_idx[routed].tolist(),
                step.topk_weights[routed].tolist(),
                strict=True,
            ):
                found[rank, *source] = (x.tolist(), ids, weights)
        by_algorithm.append(found)
    assert by_algorithm[0] == by_algorithm[1]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_idle_rank_takes_part_at_no_cost(ranks, algorithm):
    case = simple_case([(0, 8), (8, 0), (0, 0)], algorithm=algorithm)
    check_steps(case, ranks(2, all_steps, case))


def test_seven_processes(gloo):
    case = simple_case([(5, 0, 3, 9, 1, 0, 2)], num_experts=5, owner=linear_owner(5, 7))
    check_steps(case, gloo(7, all_steps, case))


def on_half_the_world(transport: Transport, case: Case) -> list | None:
    """Ranks 1 and 3 of the default group are ranks 0 and 1 of their own."""
    group = dist.new_group([1, 3])
    if transport.rank not in (1, 3):
        return None
    half = connect("gloo", group=group)
    try:
        return [half.rank, half.world_size, attempt(lambda: all_steps(half, case))]
    finally:
        half.close()


def test_a_group_of_some_of_the_processes_counts_its_own_ranks(gloo):
    case = simple_case([(9, 4), (0, 5)])
    seen = gloo(4, on_half_the_world, case)
    assert [entry and entry[:2] for entry in seen] == [None, [0, 2], None, [1, 2]]
    for entry in (seen[1], seen[3]):
        assert entry[2].error is None, entry[2].error
    check_steps(case, [seen[1][2].value, seen[3][2].value])


def on_two_transports(transport: Transport, case: Case) -> list[list[Step]]:
    other = connect("gloo")
    try:
        with case.dispatcher(transport) as first, case.dispatcher(other) as second:
            seen: list[list[Step]] = [[], []]
            for step in range(case.num_steps):
                seen[0].append(one_step(first, transport, case, step))
                seen[1].append(one_step(second, other, case, step))
            return seen
    finally:
        other.close()


def test_two_transports_of_the_same_processes_do_not_meet(gloo):
    case = simple_case([(9, 4), (0, 5)])
    seen = gloo(2, on_two_transports, case)
    for transport in (0, 1):
        check_steps(case, [by_transport[transport] for by_transport in seen])


def many_transports(transport: Transport, case: Case) -> list[Step]:
    for _ in range(20):
        connect("gloo").close()
    again = connect("gloo")
    try:
        return all_steps(again, case)
    finally:
        again.close()


def test_transports_can_be_opened_and_closed_over_and_over(gloo):
    case = simple_case([(9, 4)])
    check_steps(case, gloo(2, many_transports, case))
