"""An allocator that has only so much: for tests of what happens when memory runs out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class AllocatorLimit(TorchDispatchMode):
    """Inside, in this thread, an operator whose result takes more than `limit_bytes` raises."""

    def __init__(self, limit_bytes: float = math.inf) -> None:
        super().__init__()
        self.limit_bytes = limit_bytes

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor):
                size = leaf.numel() * leaf.element_size()
                if size > self.limit_bytes:
                    raise torch.OutOfMemoryError(f"Tried to allocate {size} bytes")
        return made
