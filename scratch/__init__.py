"""Scratch memory of the experts, the permutation that lives in it, errors and the JIT."""

from crossdock.scratch import errors
from crossdock.scratch.convert import convert_rows, swiglu
from crossdock.scratch.permutation import Permuted, permute, unpermute
from crossdock.scratch.permute_scratch import PermuteScratch, permute_scratch
from crossdock.scratch.workspace import WorkspaceManager, simultaneous_bytes

__all__ = [
    "PermuteScratch",
    "Permuted",
    "WorkspaceManager",
    "convert_rows",
    "errors",
    "permute",
    "permute_scratch",
    "simultaneous_bytes",
    "swiglu",
    "unpermute",
]
