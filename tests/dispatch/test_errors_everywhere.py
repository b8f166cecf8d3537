"""Whatever one rank does wrong, every rank raises the same error at once, and can go on."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from crossdock.dispatch import DispatchConfig, Dispatcher, ExpertPlacement, Topology, errors
from crossdock.dispatch.transports.base import Transport
from tests.dispatch.cases import (
    Attempt,
    Case,
    attempt,
    data_parallel,
    fill_results,
    one_step,
    send,
    simple_case,
)
from tests.dispatch.oracle import check_step, expected_out

CASE = simple_case([(6, 9, 5), (4, 7, 3), (11, 0, 2)], top_k=3, unrouted=0.0)
NUM_EXPERTS = CASE.config.num_experts


@dataclass
class Inputs:
    """What the offending rank is about to dispatch; each mistake spoils it."""

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor


def an_id_of_num_experts(inputs: Inputs) -> None:
    inputs.topk_idx[1, 1] = NUM_EXPERTS


def an_id_below_minus_one(inputs: Inputs) -> None:
    inputs.topk_idx[1, 1] = -2


def an_id_that_int32_would_wrap(inputs: Inputs) -> None:
    inputs.topk_idx[1, 1] = 2**32 + 1


def a_negative_id_that_int32_would_wrap(inputs: Inputs) -> None:
    inputs.topk_idx[1, 1] = -(2**32) + 1


def an_expert_twice_in_a_token(inputs: Inputs) -> None:
    inputs.topk_idx[2] = torch.tensor([5, 2, 5])


def a_nan_weight(inputs: Inputs) -> None:
    inputs.topk_weights[1, 1] = float("nan")


def an_infinite_weight(inputs: Inputs) -> None:
    inputs.topk_weights[1, 1] = float("inf")


def a_negative_infinite_weight(inputs: Inputs) -> None:
    inputs.topk_weights[1, 1] = float("-inf")


def x_of_the_wrong_hidden(inputs: Inputs) -> None:
    inputs.x = torch.cat([inputs.x, inputs.x], dim=1)


def x_of_the_wrong_dtype(inputs: Inputs) -> None:
    inputs.x = inputs.x.float()


def x_of_one_dimension(inputs: Inputs) -> None:
    inputs.x = inputs.x.flatten()


def x_of_three_dimensions(inputs: Inputs) -> None:
    inputs.x = inputs.x[None]


def x_on_another_device(inputs: Inputs) -> None:
    inputs.x = inputs.x.to("meta")


def x_that_is_nested(inputs: Inputs) -> None:
    inputs.x = torch.nested.nested_tensor([inputs.x[:1], inputs.x[1:]])


def x_that_is_sparse(inputs: Inputs) -> None:
    inputs.x = inputs.x.to_sparse()


def x_that_is_no_tensor(inputs: Inputs) -> None:
    inputs.x = inputs.x.tolist()


def fewer_tokens_than_ids(inputs: Inputs) -> None:
    inputs.x = inputs.x[1:]


def ids_and_weights_of_different_shapes(inputs: Inputs) -> None:
    inputs.topk_weights = inputs.topk_weights[:, :2]


def one_column_too_few(inputs: Inputs) -> None:
    inputs.topk_idx = inputs.topk_idx[:, :2]
    inputs.topk_weights = inputs.topk_weights[:, :2]


def ids_of_a_float_dtype(inputs: Inputs) -> None:
    inputs.topk_idx = inputs.topk_idx.float()


def weights_of_another_dtype(inputs: Inputs) -> None:
    inputs.topk_weights = inputs.topk_weights.to(torch.bfloat16)


def ids_on_another_device(inputs: Inputs) -> None:
    inputs.topk_idx = inputs.topk_idx.to("meta")


def no_ids_and_no_handle(inputs: Inputs) -> None:
    inputs.topk_idx = None
    inputs.topk_weights = None


MISTAKES: dict[Callable[[Inputs], None], str] = {
    an_id_of_num_experts: str(NUM_EXPERTS),
    an_id_below_minus_one: "-2",
    an_id_that_int32_would_wrap: str(2**32 + 1),
    a_negative_id_that_int32_would_wrap: str(-(2**32) + 1),
    an_expert_twice_in_a_token: "5",
    a_nan_weight: "nan",
    an_infinite_weight: "inf",
    a_negative_infinite_weight: "-inf",
    x_of_the_wrong_hidden: "32",
    x_of_the_wrong_dtype: "float32",
    x_of_one_dimension: "",
    x_of_three_dimensions: "[1,",
    x_on_another_device: "meta",
    x_that_is_nested: "nested",
    x_that_is_sparse: "sparse",
    x_that_is_no_tensor: "list",
    fewer_tokens_than_ids: "",
    ids_and_weights_of_different_shapes: "2",
    one_column_too_few: "2",
    ids_of_a_float_dtype: "float32",
    weights_of_another_dtype: "bfloat16",
    ids_on_another_device: "meta",
    no_ids_and_no_handle: "",
}


def good_bad_good(
    transport: Transport,
    mistake: Callable[[Inputs], None],
    offenders: tuple[int, ...],
    algorithm: str,
    base: Case = CASE,
) -> tuple[Attempt, Any]:
    case = replace(base, config=replace(base.config, algorithm=algorithm))
    with case.dispatcher(transport) as dispatcher:
        one_step(dispatcher, transport, case, 0)
        inputs = Inputs(*case.batch(1, transport.rank).to(transport.device))
        if transport.rank in offenders:
            mistake(inputs)
        seen = attempt(lambda: dispatcher.dispatch(inputs.x, inputs.topk_idx, inputs.topk_weights))
        return seen, one_step(dispatcher, transport, case, 2)


def check_everywhere(
    tries: list[Attempt], kind: type[Exception], ranks: tuple[int, ...] | None, *parts: str
) -> None:
    """The same error on all, within a second, naming the ranks and the values."""
    for seen in tries:
        assert type(seen.error) is type(tries[0].error), tries
        assert isinstance(seen.error, kind), repr(seen.error)
        assert seen.seconds < 1, seen
    assert len({str(seen.error) for seen in tries}) == 1, tries
    message = str(tries[0].error)
    if ranks is not None:
        assert tries[0].error.ranks == ranks, message
        for rank in ranks:
            assert str(rank) in message
    for part in parts:
        assert part.lower() in message.lower(), message


@pytest.mark.parametrize("algorithm", ["alltoall", "allgather"])
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_mistake_of_one_rank(ranks, mistake, algorithm):
    results = ranks(3, good_bad_good, mistake, (1,), algorithm)
    check_everywhere([seen for seen, _ in results], errors.RoutingError, (1,), MISTAKES[mistake])
    for rank, (_, good) in enumerate(results):
        check_step(replace(CASE, config=replace(CASE.config, algorithm=algorithm)), 2, rank, good)


def test_the_first_of_several_offenders_is_named(ranks):
    results = ranks(3, good_bad_good, an_id_of_num_experts, (1, 2), "alltoall")
    check_everywhere([seen for seen, _ in results], errors.RoutingError, (1,))


def unrouted_weights(transport: Transport, value: float) -> Any:
    case = simple_case([(8, 8)], unrouted=0.5)
    x, topk_idx, topk_weights = case.batch(0, transport.rank).to(transport.device)
    topk_weights[topk_idx < 0] = value
    with case.dispatcher(transport) as dispatcher:
        rows, handle = dispatcher.dispatch(x, topk_idx, topk_weights)
        fill_results(case, 0, transport.rank, rows)
        out = dispatcher.combine(rows.y, handle)
        return rows.topk_weights[: rows.num_rows].isfinite().all().item(), out.isnan().any().item()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_of_unrouted_choices_are_ignored(ranks, value):
    assert ranks(2, unrouted_weights, value) == [(True, False)] * 2


# ---- gradients ------------------------------------------------------------------------------


def with_gradients(transport: Transport, which: str, offenders: tuple[int, ...]) -> Any:
    with CASE.dispatcher(transport) as dispatcher:
        x, topk_idx, topk_weights = CASE.batch(0, transport.rank).to(transport.device)
        bad = transport.rank in offenders
        if which == "y":
            rows, handle = dispatcher.dispatch(x, topk_idx, topk_weights)
            y = rows.y.clone().requires_grad_(bad)
            seen = attempt(lambda: dispatcher.combine(y, handle))
            dispatcher.combine(rows.y.fill_(1.0), handle)
        else:
            x.requires_grad_(bad and which == "x")
            topk_weights.requires_grad_(bad and which == "topk_weights")
            seen = attempt(lambda: dispatcher.dispatch(x, topk_idx, topk_weights))
        return seen, one_step(dispatcher, transport, CASE, 1)


@pytest.mark.parametrize("offenders", [(0, 1, 2), (1,)])
@pytest.mark.parametrize("which", ["x", "topk_weights", "y"])
def test_inputs_that_require_grad_are_refused(ranks, which, offenders):
    results = ranks(3, with_gradients, which, offenders)
    check_everywhere([seen for seen, _ in results], NotImplementedError, None, "grad")
    for rank, (_, good) in enumerate(results):
        check_step(CASE, 1, rank, good)


# ---- settings that differ -------------------------------------------------------------------

BASE = {"num_experts": 8, "top_k": 3, "hidden": 16, "debug": True, "timeout_s": 20.0}
OTHERS: dict[str, Any] = {
    "num_experts": 9,
    "top_k": 4,
    "hidden": 24,
    "dtype": torch.float32,
    "algorithm": "allgather",
    "wire": "fp8",
    "bucket": 64,
    "num_sms": 8,
    "timeout_s": 21.0,
    "debug": False,
}


def construct(transport: Transport, config: DispatchConfig, owner: list[int], **options: Any):
    placement = ExpertPlacement.from_owner(torch.tensor(owner), ep_size=transport.world_size)
    return Dispatcher(
        config,
        transport,
        topology=data_parallel(transport.world_size),
        placement=placement,
        **options,
    )


def settings_differ(transport: Transport, name: str, odd_rank: int) -> tuple[Attempt, Any]:
    mine = transport.rank == odd_rank
    config = DispatchConfig(**(BASE | ({name: OTHERS[name]} if mine else {})))
    owner = [e % transport.world_size for e in range(config.num_experts)]
    seen = attempt(lambda: construct(transport, config, owner))
    with CASE.dispatcher(transport) as dispatcher:
        return seen, one_step(dispatcher, transport, CASE, 0)


@pytest.mark.parametrize("name", OTHERS)
def test_a_setting_that_differs_is_named_with_ranks_and_values(ranks, name):
    results = ranks(3, settings_differ, name, 1)
    tries = [seen for seen, _ in results]
    check_everywhere(tries, errors.DisagreementError, None, name)
    message = str(tries[0].error)
    assert 1 in tries[0].error.ranks, message
    if isinstance(OTHERS[name], int) and name in BASE and name != "debug":
        assert str(OTHERS[name]) in message
        assert str(BASE[name]) in message
    for rank, (_, good) in enumerate(results):
        check_step(CASE, 0, rank, good)


def placements_differ(transport: Transport) -> tuple[Attempt, Any]:
    owner = [0, 0, 0, 1, 1, 1, 2, 2]
    if transport.rank == 2:
        owner = [0, 0, 1, 0, 1, 1, 2, 2]
    seen = attempt(lambda: construct(transport, DispatchConfig(**BASE), owner))
    with CASE.dispatcher(transport) as dispatcher:
        return seen, one_step(dispatcher, transport, CASE, 0)


def test_a_placement_that_differs_raises_on_all(ranks):
    results = ranks(3, placements_differ)
    check_everywhere([seen for seen, _ in results], errors.DisagreementError, None, "placement")
    for rank, (_, good) in enumerate(results):
        check_step(CASE, 0, rank, good)


def topologies_differ(transport: Transport) -> Attempt:
    grids = [Topology(ranks_per_node=3, dp=3), Topology(ranks_per_node=3, pcp=3)]
    return attempt(
        lambda: Dispatcher(
            DispatchConfig(**BASE),
            transport,
            topology=grids[transport.rank == 1],
            placement=ExpertPlacement.linear(8, 3),
        )
    )


def test_topologies_that_differ_raise_on_all(ranks):
    check_everywhere(ranks(3, topologies_differ), errors.DisagreementError, None, "pcp")


def layout_of_experts(transport: Transport) -> Attempt:
    return attempt(lambda: construct(transport, DispatchConfig(**BASE, layout="expert"), [0] * 8))


def test_a_layout_that_the_transport_cannot_do_is_refused(ranks):
    check_everywhere(ranks(2, layout_of_experts), errors.ConfigError, None, "layout")


def slots_differ(transport: Transport) -> Attempt:
    return attempt(
        lambda: construct(
            transport,
            DispatchConfig(**BASE),
            [0] * 8,
            num_slots=2 if transport.rank == 1 else 1,
        )
    )


def test_num_slots_that_differ_raise_on_all(ranks):
    check_everywhere(ranks(3, slots_differ), errors.DisagreementError, None, "num_slots")


def bad_num_slots(transport: Transport, value: object) -> tuple[Attempt, Any]:
    slots = value if transport.rank == 1 else 1
    seen = attempt(lambda: CASE.dispatcher(transport, num_slots=slots))
    with CASE.dispatcher(transport) as dispatcher:
        return seen, one_step(dispatcher, transport, CASE, 0)


@pytest.mark.parametrize("value", [0, -1, 1.5, "two", None])
def test_num_slots_that_make_no_sense_on_one_rank_raise_on_all(ranks, value):
    results = ranks(3, bad_num_slots, value)
    check_everywhere([seen for seen, _ in results], errors.CrossdockError, (1,), "num_slots")
    for rank, (_, good) in enumerate(results):
        check_step(CASE, 0, rank, good)


def misfits(transport: Transport, what: str) -> tuple[Attempt, Any]:
    """Arguments that do not fit each other, on rank 1 only."""
    bad = transport.rank == 1
    size = transport.world_size
    experts = 9 if bad and what == "placement of other experts" else 8
    ep_size = size + 1 if bad and what == "placement of other ranks" else size
    grid = size + 1 if bad and what == "topology of other ranks" else size
    seen = attempt(
        lambda: Dispatcher(
            DispatchConfig(**BASE),
            transport,
            topology=data_parallel(grid),
            placement=ExpertPlacement.linear(experts, ep_size),
        )
    )
    with CASE.dispatcher(transport) as dispatcher:
        return seen, one_step(dispatcher, transport, CASE, 0)


@pytest.mark.parametrize(
    "what", ["placement of other experts", "placement of other ranks", "topology of other ranks"]
)
def test_arguments_that_do_not_fit_on_one_rank_raise_on_all(ranks, what):
    results = ranks(3, misfits, what)
    for seen, _ in results:
        assert isinstance(seen.error, errors.CrossdockError), repr(seen.error)
        assert seen.seconds < 1
    assert isinstance(results[1][0].error, errors.ConfigError | errors.DisagreementError)
    for rank, (_, good) in enumerate(results):
        check_step(CASE, 0, rank, good)


# ---- different operations -------------------------------------------------------------------


def operations_differ(transport: Transport, odd: str, even: str) -> Attempt:
    """Rank 1 calls one operation while the others call another."""
    device = transport.device
    with CASE.dispatcher(transport, num_slots=2) as dispatcher:
        rows, handle = send(dispatcher, CASE.batch(0, transport.rank), device)
        rows.y.fill_(1.0)
        calls = {
            "dispatch": lambda: send(dispatcher, CASE.batch(1, transport.rank), device),
            "combine": lambda: dispatcher.combine(rows.y, handle),
            "lock": lambda: dispatcher.lock(),
            "unlock": lambda: dispatcher.unlock(),
            "check": lambda: dispatcher.check(),
            "new dispatcher": lambda: CASE.dispatcher(transport),
        }
        return attempt(calls[odd if transport.rank == 1 else even])


@pytest.mark.parametrize(
    ("odd", "even"),
    [
        ("combine", "dispatch"),
        ("dispatch", "combine"),
        ("lock", "dispatch"),
        ("unlock", "lock"),
        ("check", "combine"),
        ("combine", "unlock"),
        ("new dispatcher", "dispatch"),
        ("combine", "new dispatcher"),
    ],
)
def test_different_operations_raise_on_all(ranks, odd, even):
    check_everywhere(ranks(3, operations_differ, odd, even), errors.DisagreementError, None)


def lock_against_dispatch_then_on(transport: Transport) -> Any:
    with CASE.dispatcher(transport) as dispatcher:
        if transport.rank == 1:
            seen = attempt(dispatcher.lock)
        else:
            seen = attempt(
                lambda: send(dispatcher, CASE.batch(1, transport.rank), transport.device)
            )
        return seen, one_step(dispatcher, transport, CASE, 0)


def test_after_different_operations_the_next_step_works(ranks):
    for rank, (seen, good) in enumerate(ranks(3, lock_against_dispatch_then_on)):
        assert isinstance(seen.error, errors.DisagreementError)
        check_step(CASE, 0, rank, good)


# ---- two dispatchers on one transport -------------------------------------------------------


def interleaved(transport: Transport) -> list:
    wide = simple_case([(6, 9, 5), (4, 7, 3)], hidden=129, algorithm="allgather", num_experts=5)
    with CASE.dispatcher(transport) as first, wide.dispatcher(transport) as second:
        seen = []
        for step in (0, 1):
            a = send(first, CASE.batch(step, transport.rank), transport.device)
            b = send(second, wide.batch(step, transport.rank), transport.device)
            fill_results(CASE, step, transport.rank, a[0])
            fill_results(wide, step, transport.rank, b[0])
            seen.append(second.combine(b[0].y, b[1]).cpu().clone())
            seen.append(first.combine(a[0].y, a[1]).cpu().clone())
        return seen


def test_two_dispatchers_share_a_transport(ranks):
    wide = simple_case([(6, 9, 5), (4, 7, 3)], hidden=129, algorithm="allgather", num_experts=5)
    for rank, outs in enumerate(ranks(3, interleaved)):
        for step in (0, 1):
            assert torch.equal(outs[2 * step], expected_out(wide, step, rank))
            assert torch.equal(outs[2 * step + 1], expected_out(CASE, step, rank))


def crossed(transport: Transport) -> Attempt:
    with CASE.dispatcher(transport) as first, CASE.dispatcher(transport) as second:
        mine = second if transport.rank == 1 else first
        return attempt(lambda: send(mine, CASE.batch(0, transport.rank), transport.device))


def test_ranks_that_call_different_dispatchers_disagree(ranks):
    check_everywhere(ranks(3, crossed), errors.DisagreementError, None)


# ---- the end --------------------------------------------------------------------------------


def after_close(transport: Transport) -> list[Attempt]:
    dispatcher = CASE.dispatcher(transport)
    rows, handle = send(dispatcher, CASE.batch(0, transport.rank), transport.device)
    dispatcher.combine(rows.y.fill_(1.0), handle)
    dispatcher.close()
    tries = [
        attempt(lambda: send(dispatcher, CASE.batch(0, transport.rank), transport.device)),
        attempt(lambda: dispatcher.combine(rows.y, handle)),
        attempt(dispatcher.lock),
    ]
    dispatcher.close()  # a second close does nothing
    return tries


def test_calls_after_close_raise_at_once(ranks):
    for tries in ranks(3, after_close):
        for seen in tries:
            assert isinstance(seen.error, errors.CrossdockError), repr(seen.error)
            assert seen.seconds < 1


def one_closes(transport: Transport) -> Attempt:
    dispatcher = CASE.dispatcher(transport)
    one_step(dispatcher, transport, CASE, 0)
    if transport.rank == 1:
        return attempt(dispatcher.close)
    seen = attempt(lambda: send(dispatcher, CASE.batch(1, transport.rank), transport.device))
    dispatcher.close()
    return seen


def test_a_peer_still_calling_hears_who_closed(ranks):
    results = ranks(3, one_closes)
    assert results[1].error is None, repr(results[1].error)
    check_everywhere([results[0], results[2]], errors.PeerClosed, (1,))
    assert results[1].seconds < 1


def user_code_fails(transport: Transport, how: str) -> tuple[Attempt, float]:
    """Rank 1's experts run out of memory between dispatch and combine."""

    def layer() -> None:
        with CASE.dispatcher(transport) as dispatcher:
            one_step(dispatcher, transport, CASE, 0)
            rows, handle = send(dispatcher, CASE.batch(1, transport.rank), transport.device)
            if transport.rank == 1:
                failure = MemoryError("experts ran dry")
                if how == "abort":
                    dispatcher.abort(failure)
                raise failure
            dispatcher.combine(rows.y.fill_(1.0), handle)

    seen = attempt(layer)
    return seen, time.monotonic()


@pytest.mark.parametrize("how", ["with block", "abort"])
def test_an_exception_in_user_code_reaches_the_peers_at_once(ranks, how):
    results = ranks(3, user_code_fails, how)
    assert isinstance(results[1][0].error, MemoryError)
    for rank in (0, 2):
        error = results[rank][0].error
        assert isinstance(error, errors.PeerFailed), repr(error)
        assert error.ranks == (1,)
        assert "experts ran dry" in str(error)
    ends = [end for _, end in results]
    assert max(ends) - min(ends) < 1


def fails_in_words_that_cannot_be_encoded(transport: Transport) -> Attempt:
    def layer() -> None:
        with CASE.dispatcher(transport) as dispatcher:
            if transport.rank == 1:
                dispatcher.abort(OSError("no file \udcff.bin"))
                return
            send(dispatcher, CASE.batch(0, transport.rank), transport.device)

    return attempt(layer)


def test_an_error_whose_text_cannot_be_encoded_reaches_the_peers(local):
    results = local(3, fails_in_words_that_cannot_be_encoded)
    assert results[1].error is None
    for rank in (0, 2):
        error = results[rank].error
        assert isinstance(error, errors.PeerFailed), repr(error)
        assert "OSError: no file \\udcff.bin" in str(error)


def agreed_error_leaves_the_block(transport: Transport) -> Attempt:
    """Every rank leaves its ``with`` block by the error that all of them raised."""

    def layer() -> None:
        with CASE.dispatcher(transport) as dispatcher:
            x, topk_idx, topk_weights = CASE.batch(0, transport.rank).to(transport.device)
            if transport.rank == 1:
                topk_idx[0, 0] = NUM_EXPERTS
            dispatcher.dispatch(x, topk_idx, topk_weights)

    return attempt(layer)


def test_an_error_of_all_ranks_leaves_the_with_block_on_all(ranks):
    check_everywhere(
        ranks(3, agreed_error_leaves_the_block), errors.RoutingError, (1,), str(NUM_EXPERTS)
    )


LONG = "x" * 150 + "\N{SNOWMAN}" * 150


def several_fail(transport: Transport) -> Attempt:
    def layer() -> None:
        with CASE.dispatcher(transport) as dispatcher:
            rows, handle = send(dispatcher, CASE.batch(1, transport.rank), transport.device)
            if transport.rank != 0:
                raise KeyError(f"number {transport.rank} {LONG}")
            dispatcher.combine(rows.y.fill_(1.0), handle)

    return attempt(layer)


def test_of_several_failures_the_first_rank_is_named_however_long_its_message(ranks):
    first, second, third = ranks(3, several_fail)
    assert isinstance(first.error, errors.PeerFailed), repr(first.error)
    assert first.error.ranks[0] == 1
    assert "number 1 xxx" in str(first.error)
    assert isinstance(second.error, KeyError)
    assert isinstance(third.error, KeyError)
    assert max(first.seconds, second.seconds, third.seconds) < 1


def everybody_checks(transport: Transport) -> None:
    with CASE.dispatcher(transport) as dispatcher:
        one_step(dispatcher, transport, CASE, 0)
        dispatcher.check()


def test_check_finds_nothing_after_a_good_step(ranks):
    assert ranks(3, everybody_checks) == [None, None, None]
