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
        if parameter.is_constexpr or (isinstance(value, int) and value == 1):
            signature[parameter.name] = "constexpr"
            constants[index,] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = _TYPES[value.dtype]
            attributes[index,] = [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[parameter.name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0:
                attributes[index,] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp32"
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=TARGET, options=settings)


def compiled_gluon(module: Any) -> Any:
    """Compile `attend_kernel` of a module in Gluon, whose launches no interpreter can record."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    kernel, block = module.attend_kernel, [1, module.KEY_BLOCK, 128]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
    types = {
        "q_ptr": "*bf16", "o_ptr": "*bf16", "reach_ptr": "*fp32", "exact_ptr": "*i8",
        "list_ptr": "*i32", "count_ptr": "*i32", "scale": "fp32",
    }  # fmt: skip
    values = {
        "KEYS": module.KEY_BLOCK, "TILE": module.QUERY_TILE, "WIDTH": 128,
        "BUFFERS": module.BUFFERS, "REGISTERS": module.REGISTERS,
    }  # fmt: skip
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        name = parameter.name
        if name.endswith("_desc"):
            signature[name] = f"tensordesc<bf16{block},{layout!r}>"
        elif parameter.is_constexpr:
            signature[name], constants[index,] = "constexpr", values[name]
        else:
            signature[name] = types.get(name, "i32")
            if name.endswith(("_ptr", "_row", "_head")):
                attributes[index,] = [["tt.divisibility", 16]]
    source = GluonASTSource(kernel, signature, constants, attributes)
    options = {"num_warps": 4, "maxnreg": module.MAX_REGISTERS}
    return triton.compile(source, target=TARGET, options=options)
