"""A capture backend without a GPU: a tape of the operators that a pass calls.

Owns the same rules as a CUDA graph has. Capturing runs nothing that lasts: what the pass wrote is
put back and what it returns is poisoned. A replay calls the same operators on the same tensors with
the same numbers, so whatever was a number of Python when it was captured stays what it was then.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from graphs.capture import Captured, Pass


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


class _Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self.before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = func._schema.arguments
        for argument, value in [
            *zip(schema, args, strict=False),
            *((each, kwargs[each.name]) for each in schema if each.name in kwargs),
        ]:
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in _tensors(value):
                    self.before.setdefault(id(tensor), (tensor, tensor.clone()))
        out = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, out))
        return out


class TapeCaptured:
    def __init__(self, recording: _Recording, output: Tensor | None, log: list[str]) -> None:
        self._calls = recording.calls
        self._log = log
        self.output = output
        self.is_released = False

    @torch.no_grad()
    def replay(self) -> None:
        assert not self.is_released, "replay of a graph that was released"
        self._log.append("replay")
        for func, args, kwargs, out in self._calls:
            again = func(*args, **kwargs)
            for old, new in zip(_tensors(out), _tensors(again), strict=True):
                if old.data_ptr() != new.data_ptr():  # views and results in place are there already
                    old.copy_(new)

    def release(self) -> None:
        self._log.append("release")
        self.is_released = True


class TapeCapture:
    """Counts what it is asked for in `log`."""

    def __init__(self, *, entry_bytes: int = 100, refuse: str | None = None) -> None:
        self.log: list[str] = []
        self._used_bytes = 0
        self._entry_bytes = entry_bytes
        self._refuse = refuse

    def warm_up(self, run: Pass) -> Tensor | None:
        self.log.append("warm_up")
        return run()

    @torch.no_grad()
    def capture(self, run: Pass) -> Captured:
        self.log.append("capture")
        if self._refuse is not None:
            raise RuntimeError(self._refuse)
        with _Recording() as recording:
            output = run()
        for tensor, before in reversed(recording.before.values()):
            tensor.copy_(before)
        if output is not None:
            output.fill_(torch.nan if output.is_floating_point() else 1)
        self._used_bytes += self._entry_bytes
        return TapeCaptured(recording, output, self.log)

    def used_bytes(self) -> int:
        return self._used_bytes

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def release_pool(self) -> None:
        self.log.append("release_pool")
