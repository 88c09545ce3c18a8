"""Convolutions under settings of their own.

Owns what cuDNN may do in the calls of one thread. The switches of `torch.backends.cudnn` are those
of the process: turned for a call they reach the convolutions of other threads, and where two
threads turn them at a time, one restores what the other had turned. Here the operator below is
given what the switches would give it. Invariants: no switch is touched; kernels and bits are those
of a process with such switches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


def convolutions_by_rule(device: torch.device) -> AbstractContextManager[object]:
    """Let cuDNN choose by its rules alone: measuring, it could choose otherwise when recorded.

    Off CUDA there is nothing to choose, and no time is spent on it.
    """
    return _Settings(benchmark=False) if device.type == "cuda" else nullcontext()


def exact_convolutions() -> AbstractContextManager[object]:
    """Let convolutions multiply in fp32: torch lets a GPU round what they read to 10 bits."""
    return _Settings(allow_tf32=False)


class _Settings(TorchFunctionMode):
    """While it is entered, and in this thread alone; what is None is as torch is set."""

    def __init__(self, *, benchmark: bool | None = None, allow_tf32: bool | None = None) -> None:
        super().__init__()
        self._benchmark, self._allow_tf32 = benchmark, allow_tf32

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.conv2d or func is torch.conv3d:
            func = self._convolve
        return func(*args, **(kwargs or {}))

    def _convolve(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: int | tuple[int, ...] = 1,
        padding: int | tuple[int, ...] = 0,
        dilation: int | tuple[int, ...] = 1,
        groups: int = 1,
    ) -> Tensor:
        cudnn = torch.backends.cudnn
        is_deterministic = cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
        convolved: Tensor = torch.ops.aten._convolution.default(
            input, weight, bias, _sizes(stride), _sizes(padding), _sizes(dilation), False, [0],
            groups, cudnn.benchmark if self._benchmark is None else self._benchmark,
            is_deterministic, cudnn.enabled,
            cudnn.allow_tf32 if self._allow_tf32 is None else self._allow_tf32,
        )  # fmt: skip
        return convolved


def _sizes(each: int | tuple[int, ...]) -> tuple[int, ...]:
    """One for all axes, or one an axis."""
    return (each,) if isinstance(each, int) else each
