"""Random numbers that are a function of where they stand, not of who draws them.

Every rank must be able to make any token's hidden state and routing, bit for bit, on any device.
A counter is hashed (the finaliser of SplitMix64, Steele et al. 2014) instead of a generator run.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["hash64", "hidden_states", "uniform"]

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def hash64(counter: Tensor, seed: int) -> Tensor:
    """64 well-mixed bits for each int64 of ``counter``, as int64; ``seed`` picks the stream."""
    z = counter * _signed(_GOLDEN) + _signed((seed + 1) * _MIX_2)
    z = (z ^ _shift_right(z, 30)) * _signed(_MIX_1)
    z = (z ^ _shift_right(z, 27)) * _signed(_MIX_2)
    return z ^ _shift_right(z, 31)


def uniform(counter: Tensor, seed: int) -> Tensor:
    """float64 in (0, 1) for each int64 of ``counter``."""
    return (_shift_right(hash64(counter, seed), 12).double() + 0.5) * 2.0**-52


def hidden_states(tokens: Tensor, hidden: int, *, seed: int, dtype: torch.dtype) -> Tensor:
    """Hidden states [T, H] of the tokens with these numbers (int64 [T]): mean 0, variance 1.

    Uniform rather than normal: one multiplication, so the bits are the same on every machine.
    """
    element = torch.arange(hidden, device=tokens.device)
    bits = _shift_right(hash64(tokens.unsqueeze(1) * hidden + element, seed), 40)
    # 24 bits, centred: exact in fp32.
    return ((bits - 2**23).float() * (math.sqrt(3) * 2.0**-23)).to(dtype)


def _signed(value: int) -> int:
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value


def _shift_right(value: Tensor, bits: int) -> Tensor:
    """Logical shift; ``>>`` of int64 copies the sign."""
    shifted: Tensor = (value >> bits) & (2 ** (64 - bits) - 1)
    return shifted
