"""Workers that run a rank's experts on the rows it received, and the layer around them.

Layers, imports point down only: ``launch`` may use everything here; this package imports
``crossdock.scratch`` (workspace, permute) and the public types of ``crossdock.dispatch``
(``ReceivedRows``, the dtypes). It never imports ``launch``, and neither of the two imports it.

    make_experts    ExpertWeights -> a worker: torch, cutlass_fp8 or humming
    worker(rows)    ReceivedRows.x -> ReceivedRows.y
    MoELayer        dispatch, worker, combine
    moe_reference   the whole layer in one process and plain fp32, with a tolerance
"""

from crossdock.experts.backends import Backend, make_experts
from crossdock.experts.gemm import Activations
from crossdock.experts.layer import Experts, MoELayer
from crossdock.experts.reference import layer_tolerance, moe_reference, reference_and_tolerance
from crossdock.experts.weights import ExpertWeights, WeightFormat
from crossdock.experts.worker import Worker

__all__ = [
    "Activations",
    "Backend",
    "ExpertWeights",
    "Experts",
    "MoELayer",
    "WeightFormat",
    "Worker",
    "layer_tolerance",
    "make_experts",
    "moe_reference",
    "reference_and_tolerance",
]
