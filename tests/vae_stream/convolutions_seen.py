"""What convolutions were told while it watches: for the tests of those who tell them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

SWITCHES = ("benchmark", "deterministic", "enabled", "allow_tf32")
"""Of `torch.backends.cudnn`, in the order in which the operator takes them."""


def switches() -> dict[str, bool]:
    return {name: getattr(torch.backends.cudnn, name) for name in SWITCHES}


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """One convolution."""

    told: dict[str, bool] | None
    """None where it goes by the switches of the process."""
    switches: dict[str, bool]
    """As they were meanwhile."""


class ConvolutionsSeen(TorchDispatchMode):
    """Of this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Seen] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._convolution.default:
            told = dict(zip(SWITCHES, args[-len(SWITCHES) :], strict=True))
            self.calls.append(Seen(told=told, switches=switches()))
        elif func is torch.ops.aten.convolution.default:
            self.calls.append(Seen(told=None, switches=switches()))
        return func(*args, **(kwargs or {}))
