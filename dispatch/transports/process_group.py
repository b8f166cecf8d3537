"""torch.distributed: gloo on the CPU, NCCL on CUDA, one code.

Records always travel over a gloo group, so that beside NCCL no stream is synchronised for them.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable
from dataclasses import astuple
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from crossdock.dispatch.transports.base import Transport, Work
from crossdock.dispatch.transports.watch import Process, Watch, grace_of, slice_of
from crossdock.scratch.errors import ConfigError, CrossdockError, TransportUnavailable

__all__ = ["ProcessGroupTransport"]

_RECORDS = "the exchange of records"


class ProcessGroupTransport(Transport):
    """Ranks of a torch process group.

    Groups of its own are made (collectively) over the ranks of ``group``, so that the caller's
    collectives and ours never mix.

    Args:
        backend: ``"gloo"`` or ``"nccl"``.
        group: Ranks to span; the default group, made from the launcher's environment if need be.
        blocks: Parts of ``group``, by ranks in it: span the part that holds this rank. All ranks of
            ``group`` give the same blocks at the same time.
        device: Where rows live: the CPU for gloo; for NCCL a CUDA device.
        timeout_s: Seconds after which a rank that does not answer is a RankTimeout.

    Raises:
        TransportUnavailable: This torch has no such backend, or there is no such device.
        ConfigError: No process group, and no launcher's environment to make one from.
    """

    def __init__(
        self,
        backend: str,
        *,
        group: dist.ProcessGroup | None,
        device: torch.device,
        timeout_s: float,
        blocks: list[list[int]] | None = None,
    ) -> None:
        _require_backend(backend, device)
        limit = timedelta(seconds=timeout_s)
        if group is None and not dist.is_initialized():
            _init_from_environment(limit)
        members = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
        parts = [members] if blocks is None else [[members[r] for r in b] for b in blocks]
        ranks = next(part for part in parts if dist.get_rank() in part)
        super().__init__(ranks.index(dist.get_rank()), len(ranks), device, timeout_s)
        self.name = backend
        self._host = _new_group(parts, "gloo", limit)
        if backend == "nccl":
            torch.cuda.set_device(device)
            self._rows = _new_group(parts, "nccl", limit)
        else:
            self._rows = self._host
        self._step = 0
        processes: list[tuple[str, int, str]] = [("", 0, "")] * self.world_size
        dist.all_gather_object(processes, astuple(Process.this()), group=self._host)
        self._watch = Watch(
            PrefixStore(f"crossdock/{self._host.group_name}", self._host.get_group_store()),
            self.rank,
            [Process(*p) for p in processes],
        )
        # A gloo group that is left to interpreter shutdown can end the process by SIGABRT.
        atexit.register(self.close)

    def _exchange(self, record: Tensor) -> Tensor:
        matrix = torch.empty(self.world_size, len(record), dtype=torch.int64)
        self._start(
            lambda: dist.all_gather(list(matrix), record, group=self._host, async_op=True),
            _RECORDS,
        ).wait()
        return matrix

    def _all_to_all(
        self, send: Tensor, send_rows: list[int], recv: Tensor, recv_rows: list[int]
    ) -> Work:
        return self._start(
            lambda: dist.all_to_all_single(
                recv, send, recv_rows, send_rows, group=self._rows, async_op=True
            ),
            "the exchange of rows",
        )

    def _all_gather(self, send: Tensor, recv: Tensor, rows: list[int]) -> Work:
        # gloo's all_gather wants equal sizes; a broadcast for each rank does not.
        parts = torch.split(recv, rows)
        parts[self.rank].copy_(send)

        def broadcast(source: int) -> dist.Work | None:
            work: dist.Work | None = dist.broadcast(
                parts[source], group_src=source, group=self._rows, async_op=True
            )
            return work

        sources = [source for source, count in enumerate(rows) if count]
        return _All([self._start(partial(broadcast, s), "the gather of rows") for s in sources])

    def set_timeout(self, timeout_s: float) -> None:
        """Change the limit of the groups too."""
        super().set_timeout(timeout_s)
        # gloo ends a pending operation at its own limit; until then the process cannot exit.
        for group in {self._host, self._rows}:
            group.set_timeout(timedelta(seconds=timeout_s))

    def close(self) -> None:
        """Destroy this transport's groups, unless it is broken."""
        atexit.unregister(self.close)
        if self.ledger.broken is not None or not dist.is_initialized():
            return
        for group in {self._host, self._rows}:
            dist.destroy_process_group(group)

    def _start(self, begin: Callable[[], dist.Work | None], during: str) -> _Waiting:
        self._step += 1
        try:
            work = begin()
        except RuntimeError as error:
            raise self._lost(self._step, during) from error
        assert work is not None
        return _Waiting(self, work, self._step, during)

    def tell_failure(self, said: str) -> None:
        """Write it down, then close the sockets of the group, which ends the others' wait."""
        self._watch.condemn({self.rank: said})
        dist.destroy_process_group(self._host)
        # They are closed with the last reference; the transport is broken, nobody will ask for it.
        if self._rows is self._host:
            del self._rows
        del self._host

    def heard(self) -> dict[int, str] | None:
        """What another rank wrote down."""
        return self._watch.verdict()

    def declare_lost(self, during: str) -> CrossdockError:
        """Say who is missing, after a wait over other groups of these ranks was in vain.

        All ranks that are there come to this, or to the next exchange.
        """
        return self._lost(self._step + 1, during)

    def _lost(self, step: int, during: str) -> CrossdockError:
        missing = self._watch.find_missing(step, grace_of(self.timeout_s))
        return self.break_with(missing, during)

    def wait_for(self, work: dist.Work, step: int, during: str) -> None:
        """Wait for a collective, publish that this rank waits, and say who never came."""
        if self.name == "nccl" and during != _RECORDS:
            work.wait()  # in stream order; lost ranks are found by the next record
            return
        limit = self.timeout_s
        deadline = time.monotonic() + limit - grace_of(limit)
        while True:
            has_ended = work.is_completed()
            try:
                work.wait(slice_of(limit))
                return
            except RuntimeError as error:
                # What ends only now may have ended well; the next wait says so at once.
                if has_ended or (time.monotonic() > deadline and not work.is_completed()):
                    raise self._lost(step, during) from error
            self._watch.look()
            self._watch.publish(step)
            known = self._watch.verdict()
            if known is not None:
                raise self.break_with(known, during)


class _Waiting:
    """A collective on its way, with what is needed to say who is missing if it never ends."""

    def __init__(
        self, transport: ProcessGroupTransport, work: dist.Work, step: int, during: str
    ) -> None:
        self._transport, self._work, self._step, self._during = transport, work, step, during

    def wait(self) -> None:
        self._transport.wait_for(self._work, self._step, self._during)


class _All:
    def __init__(self, works: list[_Waiting]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def _require_backend(backend: str, device: torch.device) -> None:
    if not dist.is_available():
        raise TransportUnavailable("this torch was built without torch.distributed")
    if backend == "gloo" and device.type != "cpu":
        raise ConfigError(f"gloo moves rows between CPUs; device is {device}: use nccl, or cpu")
    if backend == "nccl":
        if device.type != "cuda":
            raise ConfigError(
                f"nccl moves rows between GPUs; device is {device}: use gloo, or cuda"
            )
        if not torch.cuda.is_available():
            raise TransportUnavailable("nccl needs a CUDA GPU, and torch sees none here: use gloo")
        if not dist.is_nccl_available():
            raise TransportUnavailable("this torch has no NCCL: install a CUDA build of torch")


def _init_from_environment(limit: timedelta) -> None:
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    unset = [name for name in names if name not in os.environ]
    if unset:
        raise ConfigError(
            f"no process group, and {', '.join(unset)} not set: start with torchrun (or through "
            "`crossdock run`), call torch.distributed.init_process_group, or use run_local"
        )
    dist.init_process_group("gloo", timeout=limit)
    # Not with the transport, which may be closed and made anew on the same group.
    atexit.register(_destroy_default_group)


def _destroy_default_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _new_group(parts: list[list[int]], backend: str, limit: timedelta) -> dist.ProcessGroup:
    """This rank's of the groups that span the parts."""
    # Ranks outside the parts cannot be asked to take part. But then torch names the group by its
    # ranks, and a second one would meet the keys of the first in the store; so only then.
    some_ranks = sum(map(len, parts)) < dist.get_world_size()
    mine = None
    for ranks in parts:
        here = dist.get_rank() in ranks
        if here or not some_ranks:
            group = dist.new_group(
                ranks, timeout=limit, backend=backend, use_local_synchronization=some_ranks
            )
            mine = group if here else mine
    assert isinstance(mine, dist.ProcessGroup)
    return mine
