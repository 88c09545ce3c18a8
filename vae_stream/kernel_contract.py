"""What the kernels of the H3 decoders demand of a device and of their arguments.

Owns the checks at the border of an operator: a kernel refuses what it cannot do.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

_DTYPES = (torch.float32, torch.bfloat16)


def kernels_run_on(device: torch.device) -> bool:
    """Whether Triton takes tensors there: on CUDA, or anywhere while it interprets."""
    if importlib.util.find_spec("triton") is None:
        return False
    if device.type == "cuda":
        return True
    import triton

    return bool(triton.knobs.runtime.interpret)


def require(op: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], name: str) -> None:
    """Refuse a tensor that is not on a device of kernels, of the dtype and shape, and dense.

    Raises: ValueError.
    """
    if not kernels_run_on(tensor.device):
        raise ValueError(f"{op}: {name} is on {tensor.device}; allowed: cuda with triton")
    if tensor.dtype != dtype or (dtype.is_floating_point and dtype not in _DTYPES):
        raise ValueError(f"{op}: {name} is {tensor.dtype}; allowed: {dtype} of {_DTYPES} or int")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{op}: {name} has shape {tuple(tensor.shape)}; allowed: {shape}")
    if not tensor.is_contiguous():
        raise ValueError(f"{op}: {name} has strides {tensor.stride()}; allowed: dense rows")
