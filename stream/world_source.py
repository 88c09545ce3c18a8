"""Where the worker gets its worlds: a seam, so that other worlds can be served by the same loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from stream.jobs import Start, WorldSpec

if TYPE_CHECKING:
    from stream.session import World


class WorldSource(Protocol):
    """Keeps what is loaded."""

    def open(self, start: Start) -> World:
        """Open a world at a first picture."""

    def close(self) -> None:
        """Free what is loaded."""


OpenSource = Callable[[WorldSpec], WorldSource]


class LoadedWorlds:
    """Worlds of one spec, from their weights."""

    def __init__(self, spec: WorldSpec) -> None:
        from stream.worlds import ModelCache

        self._spec = spec
        self._models = ModelCache()

    def open(self, start: Start) -> World:
        """Open a world; the first call loads the weights."""
        return self._models.world(self._spec, start)

    def close(self) -> None:
        """Free the weights."""
        self._models.close()
