"""Compiles the kernels for an H200 on any machine, from launches that are recorded.

Owns `compiled_launches` and `summed`. Triton brings its own assembler; no GPU and no driver is
needed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

TARGET = GPUTarget("cuda", 90, 32)
_TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@contextmanager
def _recorded() -> Iterator[list[tuple[JITFunction, dict[str, Any], dict[str, int]]]]:
    launches: list[tuple[JITFunction, dict[str, Any], dict[str, int]]] = []

    def record(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        names = ("num_warps", "num_stages", "enable_fp_fusion", "maxnreg")
        settings = {name: options.pop(name) for name in names if name in options}
        given = dict(zip(kernel.arg_names, args, strict=False)) | options
        launches.append((kernel, given, settings))

    original = JITFunction.run
    JITFunction.run = record
    try:
        yield launches
    finally:
        JITFunction.run = original


def compiled_launches(launch: Callable[[], Any]) -> list[Any]:
    """Compile what `launch` launches; each result has `asm` and `metadata`."""
    with _recorded() as launches:
        launch()
    return [_compiled(*each) for each in launches]


def summed(kernel: Any) -> list[str]:
    """Shape of each sum in a compiled kernel and how it lies over threads: its order."""
    text = kernel.asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = (#ttg.*)$", text, re.MULTILINE))
    sums = re.findall(
        r'"tt\.reduce".*?arith\.addf.*?\}\) : \((tensor<[^#]*)(#\w+)>\)', text, re.DOTALL
    )
    return [f"{shape}{layouts[layout]}" for shape, layout in sums]


def _compiled(kernel: JITFunction, given: dict[str, Any], settings: dict[str, int]) -> Any:
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, parameter in enumerate(kernel.params):
        value = given[parameter.name]
        is_plain = isinstance(value, int) and not parameter.do_not_specialize
        if parameter.is_constexpr or (is_plain and value == 1):
            signature[parameter.name] = "constexpr"
            constants[index,] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = _TYPES[value.dtype]
            attributes[index,] = [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[parameter.name] = "i32" if abs(value) < 2**31 else "i64"
            if is_plain and value % 16 == 0:
                attributes[index,] = [["tt.divisibility", 16]]
        elif isinstance(value, TensorDescriptor):
            kind = _TYPES[value.base.dtype].removeprefix("*")
            signature[parameter.name] = f"tensordesc<{kind}{value.block_shape},{value.layout!r}>"
        else:
            signature[parameter.name] = "fp32"
    source_kind = GluonASTSource if kernel.is_gluon() else ASTSource
    source = source_kind(kernel, signature, constants, attributes)
    return triton.compile(source, target=TARGET, options=settings)
