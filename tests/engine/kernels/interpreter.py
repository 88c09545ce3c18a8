"""Triton's interpreter with the rounding of a GPU, and in half the time.

As shipped it cuts bf16 off instead of rounding it, and carries a rounded e4m3 mantissa wrongly; a
GPU rounds to nearest, ties to even, as torch does on any device. It multiplies the bits of bf16
instead of their values, and takes no argument of a kernel as the end of a loop. It also replaces
the whole language anew at each call from one kernel function to another; once a launch is enough.
Owns the changes that mend this for a process.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_TORCH = {
    tl.float32: (torch.float32, torch.int32),
    tl.float16: (torch.float16, torch.int16),
    tl.bfloat16: (torch.bfloat16, torch.int16),
    tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8),
}


_PATCH_TENSOR = interpreter._patch_lang_tensor
_REPLACED: set[str] = set()
"""Modules of Triton's own functions, which see the language by another name."""


def _convert(bits: Any, source: Any, target: Any, rounding: Any) -> Any:
    """Return the unsigned bits of values [...] in the target type."""
    dtype, integer = _TORCH[source]
    signed = np.ascontiguousarray(bits).view(torch.empty(0, dtype=integer).numpy().dtype)
    values = torch.from_numpy(signed.copy()).view(dtype)
    dtype, integer = _TORCH[target]
    rounded = values.to(dtype).contiguous().view(integer).numpy()
    return rounded.view(getattr(np, f"uint{target.primitive_bitwidth}")).reshape(bits.shape)


def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a function inside a launch, which has replaced the language where kernels see it."""
    module = function.fn.__module__
    if module.startswith("triton.") and module not in _REPLACED:
        interpreter._patch_lang(function.fn)
        _REPLACED.add(module)
    return function.rewrite()(*args, **kwargs)


def _product(builder: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
    """Return a b + d, of values as wide as their sum."""
    sides = [
        each.data
        if each.dtype.primitive_bitwidth == 32
        else _convert(each.data, each.dtype, tl.float32, None).view(np.float32)
        for each in (a, b)
    ]
    return interpreter.TensorHandle(np.matmul(*sides) + d.data, d.dtype.scalar)


def _patch_tensor(tensor: Any, scope: Any) -> None:
    """Let a tensor of one element count as a number."""
    _PATCH_TENSOR(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def mend_interpreter() -> None:
    """Change the interpreter of this process, which has to have been started in that mode."""
    interpreter._patch_lang_tensor = _patch_tensor
    interpreter.InterpreterBuilder.create_dot = _product
    interpreter._convert_float = _convert
    interpreter.InterpretedFunction.__call__ = _call
