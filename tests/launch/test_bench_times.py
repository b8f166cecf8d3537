import torch

from crossdock.dispatch import run_local
from crossdock.launch.bench.graphs import slowest_rank


def test_each_round_counts_with_its_slowest_rank():
    def measure(transport):
        samples = torch.zeros(2, 101, dtype=torch.int64)  # more than go into one record
        samples[0] = 5000
        samples[1] = torch.arange(101) * 1000 if transport.rank else 3000
        return slowest_rank(transport, ["equal", "ragged"], samples)

    for found in run_local(2, measure):
        assert found.medians == {"equal": 5.0, "ragged": 50.0}
        assert found.tails == {"equal": 5.0, "ragged": 95.0}
