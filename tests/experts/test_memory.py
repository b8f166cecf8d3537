from pathlib import Path

from crossdock.experts.bench import experts_memory_table

TRACE = Path(__file__).parents[2] / "configs" / "traces" / "routing-e256-k8.safetensors"


def test_pairs_need_a_sixth_of_what_rows_times_top_k_would_at_32_ranks():
    (row,) = experts_memory_table(TRACE, ep_sizes=(32,))
    assert row["pairs_mean"] == 4096 * 8
    assert row["rows_max"] <= row["pairs_max"]
    assert row["bytes_by_rows_x_top_k"] > 6 * row["bytes_by_pairs"]
