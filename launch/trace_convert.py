"""Reading routing that others recorded."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from crossdock.scratch.errors import ConfigError

__all__ = ["read_foreign"]


def read_foreign(path: Path, idx_key: str, weights_key: str) -> tuple[Tensor, Tensor]:
    """Ids and weights, [layers, tokens, K] each, of an ``.npz`` or ``.pt`` file.

    Raises:
        ConfigError: Not such a file, or it has no arrays of these names.
    """
    arrays = _read(path)
    missing = [key for key in (idx_key, weights_key) if key not in arrays]
    if missing:
        raise ConfigError(
            f"{path} has no {' and no '.join(missing)}; it has {', '.join(map(str, arrays))}: name "
            "them by --idx-key and --weights-key"
        )
    topk_idx, topk_weights = arrays[idx_key], arrays[weights_key]
    if topk_idx.dim() == 2:
        topk_idx, topk_weights = topk_idx.unsqueeze(0), topk_weights.unsqueeze(0)
    if topk_weights.dtype == torch.float64:
        topk_weights = topk_weights.float()
    return topk_idx, topk_weights


def _read(path: Path) -> Mapping[str, Tensor]:
    if path.suffix not in (".npz", ".pt", ".pth"):
        raise ConfigError(f"{path}: .npz, .pt or .pth is wanted")
    try:
        if path.suffix == ".npz":
            with np.load(path) as arrays:
                return {name: torch.from_numpy(arrays[name]) for name in arrays.files}
        loaded: Any = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (OSError, ValueError, TypeError, RuntimeError, EOFError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    except (zipfile.BadZipFile, pickle.UnpicklingError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not isinstance(loaded, Mapping):
        raise ConfigError(f"{path} holds a {type(loaded).__name__}; a dict of tensors is wanted")
    return {str(name): part for name, part in loaded.items() if isinstance(part, Tensor)}
