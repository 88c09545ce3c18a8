"""Inputs at fixed addresses, which captured graphs read.

Owns the tensors and the checks of what is copied into them. Invariant: after construction no tensor
is replaced, so an address that a graph has recorded stays right.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


class StaticBuffers:
    """Named tensors whose content changes and whose place does not.

    Args:
        tensors: taken over as they are.
        check_addresses: compare every address with the first one at each copy.

    Raises: ValueError when two of them share memory: the second copy would spoil the first.
    """

    def __init__(self, tensors: Mapping[str, Tensor], *, check_addresses: bool = False) -> None:
        self._tensors = dict(tensors)
        self._check_addresses = check_addresses
        self.addresses = tuple(tensor.data_ptr() for tensor in self._tensors.values())
        """In the order of the names; part of what tells one captured graph from another."""
        storages = [tensor.untyped_storage().data_ptr() for tensor in self._tensors.values()]
        if len(set(storages)) != len(storages):
            raise ValueError(f"tensors: {self.names} share memory; allowed: one storage each")

    @property
    def names(self) -> tuple[str, ...]:
        """Names in order."""
        return tuple(self._tensors)

    @property
    def size_bytes(self) -> int:
        """Memory of all of them."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def copy_in(self, **values: Tensor) -> None:
        """Overwrite some of the tensors, in the current stream.

        Raises:
            ValueError: unknown name, other shape, dtype or device. Nothing is copied then.
            RuntimeError: a tensor moved (only with `check_addresses`).
        """
        for name, value in values.items():
            self._check(name, value)
        if self._check_addresses:
            self.check_addresses()
        for name, value in values.items():
            self._tensors[name].copy_(value)

    def check_addresses(self) -> None:
        """Compare every address with that at construction.

        Raises: RuntimeError.
        """
        for name, address in zip(self.names, self.addresses, strict=True):
            if self._tensors[name].data_ptr() != address:
                raise RuntimeError(
                    f"{name}: moved from {address:#x} to {self._tensors[name].data_ptr():#x}; "
                    "captured graphs still read the old place"
                )

    def _check(self, name: str, value: Tensor) -> None:
        if name not in self._tensors:
            raise ValueError(f"{name}: no such input; allowed: {', '.join(self.names)}")
        target = self._tensors[name]
        for what in ("shape", "dtype", "device"):
            got, allowed = getattr(value, what), getattr(target, what)
            if got != allowed:
                raise ValueError(f"{name}: {what} is {got}; allowed: {allowed}")
