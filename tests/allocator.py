"""An allocator that has only so much: for tests of what happens when memory runs out."""

from __future__ import annotations

import math
import weakref
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


class LiveBytes(TorchDispatchMode):
    """Inside, in this thread, counts the memory of results that are new and not dropped yet."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._live: dict[int, int] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {
            leaf.untyped_storage()._cdata
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, Tensor)
        }
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor) and leaf.device.type == "cpu":
                storage = leaf.untyped_storage()
                key = storage._cdata
                if key not in given and key not in self._live:
                    self._live[key] = storage.nbytes()
                    weakref.finalize(storage, self._live.pop, key, None)
        self.peak_bytes = max(self.peak_bytes, sum(self._live.values()))
        return made
