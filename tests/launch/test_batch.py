from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from crossdock.launch.batch import make_batch, make_batches
from crossdock.launch.config import load_job
from tests.launch.conftest import SMALL

GRIDS = [
    (dp, pcp, tp) for dp in (1, 2, 3) for pcp in (1, 2, 4) for tp in (1, 2, 3) if dp * pcp * tp <= 8
]


@settings(max_examples=40)
@given(data=st.data(), grid=st.sampled_from(GRIDS), sequence_parallel=st.booleans())
def test_every_token_is_dispatched_once_and_numbered_by_its_owner(
    tmp_path_factory, data, grid, sequence_parallel
):
    dp, pcp, tp = grid
    lengths = st.lists(st.integers(0, 11), max_size=3)
    prefill = data.draw(st.lists(lengths, min_size=dp, max_size=dp))
    decode = data.draw(st.lists(st.integers(0, 6), min_size=dp, max_size=dp))
    path = tmp_path_factory.mktemp("batch") / "c.yaml"
    path.write_text(SMALL)
    job = load_job(
        path,
        [
            f"cluster.ranks_per_node={dp * pcp * tp}",
            f"parallel={{dp: {dp}, pcp: {pcp}, tp: {tp}, "
            f"sequence_parallel: {str(sequence_parallel).lower()}}}",
            f"run.batch={{prefill: {prefill}, decode: {decode}}}",
        ],
    )
    batches = make_batches(job)
    total = sum(map(sum, prefill)) + sum(decode)
    assert {batch.total for batch in batches} == {total}
    owned = [batch.to_ep(batch.numbers) for batch in batches]
    assert torch.equal(torch.cat(owned), torch.arange(total))
    for rank, (batch, mine) in enumerate(zip(batches, owned, strict=True)):
        assert len(mine) == batch.num_owned
        assert torch.equal(batch.numbers, make_batch(job, rank).numbers)
    # Ranks of one DP replica hold the same set of decode tokens, and tp ranks the same tokens.
    for rank, batch in enumerate(batches):
        first_of_tp = batches[rank - rank % tp]
        assert torch.equal(batch.numbers, first_of_tp.numbers)


def test_tokens_per_rank_are_dispatched_as_they_are(small_job):
    job = small_job("run.batch={tokens_per_rank: [4, 0, 1, 2]}")
    batches = make_batches(job)
    assert [batch.numbers.tolist() for batch in batches] == [[0, 1, 2, 3], [], [4], [5, 6]]
    assert [batch.num_owned for batch in batches] == [4, 0, 1, 2]


def test_each_decode_token_travels_once(small_job):
    job = small_job("run.batch={decode: [5, 2]}")
    batches = make_batches(job)
    assert [batch.num_attention_tokens for batch in batches] == [5, 5, 2, 2]
    assert [batch.num_owned for batch in batches] == [3, 2, 1, 1]
