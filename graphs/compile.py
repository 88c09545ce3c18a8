"""Compilation of a module or function under a named mode.

Owns the names of the modes and their options. Knows no model: callers decide what to compile, keep
the eager original, and compare the two.
"""

import os
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch

RECOMPILE_LIMIT = 64
"""Forms of one function in a process. torch allows 8, which two models of three shapes exceed."""

P = ParamSpec("P")
R = TypeVar("R")


class CompileMode(StrEnum):
    """What the compiler may spend time on."""

    EAGER = "eager"
    """No compilation: the function itself comes back."""

    BLOCKS = "blocks"
    """Fuse elementwise work; fixed shapes; no autotuning. Seconds to compile."""

    TUNED = "tuned"
    """As BLOCKS, with matmul autotuning and without CUDA graphs. Minutes to compile."""


def compile_module(
    fn: Callable[P, R], mode: CompileMode = CompileMode.BLOCKS, *, full_graph: bool = True
) -> Callable[P, R]:
    """Return `fn` compiled for fixed shapes, or `fn` itself for `CompileMode.EAGER`.

    Compilation itself happens at the first call with each set of shapes. `full_graph` refuses graph
    breaks, which would hide a slow path.

    Raises:
        ValueError: `mode` is not a CompileMode.
    """
    if mode not in list(CompileMode):
        allowed = ", ".join(CompileMode)
        raise ValueError(f"mode: {mode!r} is unknown; allowed: {allowed}")
    if mode == CompileMode.EAGER:
        return fn
    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
    _shorten_reports()
    torch_mode = "max-autotune-no-cudagraphs" if mode == CompileMode.TUNED else None
    compiled: Callable[P, R] = torch.compile(
        fn, dynamic=False, fullgraph=full_graph, mode=torch_mode
    )
    return compiled


def compile_region(fn: Callable[P, R]) -> Callable[P, R]:
    """Return `fn` marked as a region: whatever is compiled around its calls compiles it once.

    A pass of fifty equal blocks then takes as long to compile as a few. `fn` itself runs where
    nothing is compiled.
    """
    region: Callable[P, R] = torch.compiler.nested_compile_region(fn)
    return region


def keep_compiled_code(folder: Path) -> None:
    """Keep what the compiler makes on disk, so that the next process finds it.

    A folder that the environment names already stays. Call it before anything is compiled.
    """
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))


def _shorten_reports() -> None:
    """Let the compiler's reports of an operator name it without its arguments.

    torch 2.11 writes one for each operator of ours that a process meets first, whether anybody logs
    it or not. An argument is written as the expression that it is, one level within the other, and
    twice where it is used twice: rounded sums before a quantiser took more than three minutes.
    """
    from torch._inductor.exc import OperatorIssue

    OperatorIssue.operator_str = staticmethod(_report)  # type: ignore[method-assign]


def _report(target: object, args: object, kwargs: object) -> str:
    return f"  target: {target}"
