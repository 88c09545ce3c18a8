"""What every kernel demands of its arguments.

Owns the checks at the border of an operator: a kernel refuses what it cannot do and never falls
back. Kernels read strides; only the last axis has to be dense.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from engine.errors import ConfigError, UnsupportedError
from engine.kernels.reference import FP8_BLOCK

ROUNDINGS = ("eager", "fast")
FP8_ROW_MULTIPLE = 4
"""Rows that products of blocks ask for; those past the last one may hold anything."""
_DTYPES = (torch.float32, torch.bfloat16)
_SCALE_ROWS = 256
"""Rows whose factors products by row may read, past the last one too."""


def kernels_run_on(x: Tensor) -> bool:
    """Whether Triton takes tensors like ``x``: on CUDA, or anywhere while it interprets."""
    if x.device.type == "cuda":
        return True
    if importlib.util.find_spec("triton") is None:
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)


@cache
def has_gluon() -> bool:
    """Whether Triton has Gluon with what Hopper needs."""
    try:
        return importlib.util.find_spec("triton.experimental.gluon.nvidia.hopper") is not None
    except ImportError:  # of the packages around it
        return False


def require_kernels(op: str, x: Tensor) -> None:
    """Raises: UnsupportedError where no kernel runs."""
    if not kernels_run_on(x):
        raise UnsupportedError(
            f"{op}: tensors are on {x.device}; allowed: cuda (or TRITON_INTERPRET=1, which is slow)"
        )


def require_rounding(op: str, rounding: str) -> None:
    """Raises: ConfigError for an unknown rounding."""
    if rounding not in ROUNDINGS:
        raise ConfigError(f"{op}: rounding is {rounding!r}; allowed: {', '.join(ROUNDINGS)}")


def require_rows(op: str, **tensors: Tensor) -> None:
    """Refuse rows that are not fp32 or bf16, not dense in the last axis or not of one dtype.

    Raises: ConfigError.
    """
    first = next(iter(tensors.values()))
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES or tensor.dtype != first.dtype:
            raise ConfigError(
                f"{op}: {name} is {tensor.dtype}; allowed: float32 or bfloat16, one for all rows"
            )
        require_dense(op, name, tensor)


def require_dense(op: str, name: str, tensor: Tensor) -> None:
    """Raises: ConfigError unless neighbours on the last axis are neighbours in memory."""
    if tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
        raise ConfigError(
            f"{op}: {name} has stride {tensor.stride(-1)} on its last axis; allowed: 1"
        )


def require_shape(op: str, name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raises: ConfigError for another shape."""
    if tuple(tensor.shape) != shape:
        raise ConfigError(f"{op}: {name} has shape {tuple(tensor.shape)}; allowed: {shape}")


def require_delta(op: str, name: str, delta: Tensor | None, like: Tensor) -> None:
    """Refuse what is to be added to a tensor unless it is contiguous and of its shape and dtype.

    Raises: ConfigError.
    """
    if delta is None:
        return
    require_shape(op, name, delta, tuple(like.shape))
    if delta.dtype != like.dtype or not delta.is_contiguous():
        raise ConfigError(
            f"{op}: {name} is {delta.dtype} with strides {delta.stride()}; allowed: {like.dtype}, "
            "contiguous"
        )


def require_runs(op: str, name: str, tensor: Tensor, batch_size: int, rows: int) -> None:
    """Refuse [B or 1, runs, ...] whose runs do not share the rows out evenly.

    Raises: ConfigError.
    """
    batch, runs = tensor.shape[:2]
    if batch not in (1, batch_size) or rows % runs:
        raise ConfigError(
            f"{op}: {name} has {batch} samples of {runs} runs; allowed: 1 or {batch_size} samples, "
            f"a number of runs that divides {rows} rows"
        )


def batch_stride(tensor: Tensor) -> int:
    """Step from one sample to the next; 0 where one serves all."""
    return 0 if tensor.shape[0] == 1 else tensor.stride(0)


def require_blocks(op: str, width: int) -> None:
    """Raises: ConfigError for rows that are no whole blocks of channels."""
    if width % FP8_BLOCK:
        raise ConfigError(f"{op}: {width} channels in blocks; allowed: multiples of {FP8_BLOCK}")


def rows_in_blocks(rows: int) -> int:
    """Rows of a product of blocks that has room for so many."""
    return -(-rows // FP8_ROW_MULTIPLE) * FP8_ROW_MULTIPLE


def new_quantized(
    like: Tensor, shape: Sequence[int], in_blocks: bool = False
) -> tuple[Tensor, Tensor]:
    """Return room for e4m3 codes of a shape, and for their fp32 factors.

    One factor a row [..., 1], or one a block [..., K / 128]: as a product of blocks reads them, the
    rows of all samples are then neighbours. Both have the storage of some rows more, which such
    products ask for; a product by row may read factors past the end.

    Args:
        like: says where.
        shape: of the codes, [..., K].
        in_blocks: the form of the factors.
    """
    *lead, width = shape
    rows = math.prod(lead)
    room = rows_in_blocks(rows)
    codes = like.new_empty((room, width), dtype=torch.float8_e4m3fn)[:rows].view(shape)
    if in_blocks:
        padded = like.new_empty((width // FP8_BLOCK, room), dtype=torch.float32)
        return codes, padded.t()[:rows].unflatten(0, lead)
    padded = like.new_empty(-(-rows // _SCALE_ROWS) * _SCALE_ROWS, dtype=torch.float32)
    return codes, padded[:rows].view(*lead, 1)
