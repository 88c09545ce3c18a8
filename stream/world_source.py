"""Where the worker gets its worlds: a seam, so that other worlds can be served by the same loop.

Owns what is loaded and which world is open. Importing this module loads no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from stream.jobs import check_prompt
from stream.load_news import LoadNews
from stream.worker_messages import GraphUse, StartFrom
from stream.world_place import place_world
from stream.world_spec import Start, WorldSpec, read_start

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from graphs.runner import GraphRunner
    from stream.followers import Followers
    from stream.session import World


class WorldSource(Protocol):
    """Keeps what is loaded."""

    def open(self, start: Start) -> World:
        """Open a world at a first picture."""

    @property
    def followers(self) -> FollowerUse:
        """What the other processes take that share these worlds."""

    def close(self) -> None:
        """Free what is loaded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FollowerUse:
    """Processes that share the worlds of a worker, itself left out."""

    pids: tuple[int, ...] = ()
    device_bytes: int = 0
    """On GPUs."""


OpenSource = Callable[[WorldSpec, LoadNews], WorldSource]


class LoadedWorlds:
    """Worlds of one spec, from their weights, on the devices of its seat.

    Raises: ConfigError, DeviceError where the devices do not suffice, before anything is loaded.
    """

    def __init__(self, spec: WorldSpec, news: LoadNews) -> None:
        from engine.device import gpu_count
        from engine.ranks import Ranks
        from stream.worlds import ModelCache

        devices = place_world(spec, gpu_count())
        self._followers: Followers | None = None
        if len(devices) > 1:
            from stream.followers import Followers

            self._followers = Followers(devices, on_failure=news.failed)
        ranks = Ranks(own_device=devices[0]) if self._followers is None else self._followers.ranks
        self._spec = spec
        self._models = ModelCache(news, ranks, followers=self._followers, is_played=True)

    def open(self, start: Start) -> World:
        """Open a world; the first call loads the weights."""
        return self._models.world(self._spec, start)

    @property
    def followers(self) -> FollowerUse:
        """What they take, if there are any."""
        if self._followers is None:
            return FollowerUse()
        return FollowerUse(pids=self._followers.pids, device_bytes=self._followers.device_bytes)

    def close(self) -> None:
        """Free the weights."""
        self._models.close()
        if self._followers is not None:
            self._followers.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenWorld:
    """A world and the picture that it is open at."""

    start_from: StartFrom
    start: Start
    world: World


class Worlds:
    """Worlds of one worker, of which one is open."""

    def __init__(self, spec: WorldSpec, open_source: OpenSource, news: LoadNews) -> None:
        self._spec = spec
        self._news = news
        self._open_source = open_source
        self._source: WorldSource | None = None
        self._open: OpenWorld | None = None

    def open(self, start_from: StartFrom) -> OpenWorld:
        """Open a world, or take the one that is open at this picture; the first call loads."""
        if self._open is None or self._open.start_from != start_from:
            if self._source is None:
                self._source = self._open_source(self._spec, self._news)
            start = read_start(self._spec, image=start_from.image_path, scene=start_from.scene)
            world = self._source.open(start)
            self._open = OpenWorld(start_from=start_from, start=start, world=world)
        return self._open

    def prepare(self, start_from: StartFrom, prompt: str | None) -> str:
        """Open a world and encode its prompt, by default the scene's own; return the prompt.

        Raises: ConfigError for a prompt that is not taken.
        """
        from stream.worlds import default_prompt

        opened = self.open(start_from)
        prompt = check_prompt(default_prompt(opened.start) if prompt is None else prompt)
        opened.world.prepare_prompt(prompt)
        return prompt

    def first_picture(self, start_from: StartFrom) -> NDArray[np.uint8]:
        """Return the picture that a world begins with, uint8 RGB [H, W, 3]."""
        from stream.renderer import RendererWorld

        image = self.open(start_from).start.image
        if image is not None:
            return image.rgb_HWC
        assert start_from.scene is not None
        picture = RendererWorld(start_from.scene, self._spec.geometry).first_picture()
        rgb_HWC: NDArray[np.uint8] = picture.numpy()
        return rgb_HWC

    def forget(self) -> None:
        """Take no world as it is: its last step failed."""
        self._open = None

    def device_bytes(self) -> int:
        """Memory that is held on the devices of the open world; from any thread."""
        opened, source = self._open, self._source
        if opened is None or source is None:  # torch may not be there yet: nothing to wait for here
            return 0
        from engine.device import held_bytes

        return held_bytes(opened.world.device) + source.followers.device_bytes

    def follower_pids(self) -> tuple[int, ...]:
        """Processes that share the worlds; from any thread."""
        return () if self._source is None else self._source.followers.pids

    def graphs(self) -> tuple[GraphUse, ...]:
        """What recording made of the passes of the open world's parts; from any thread."""
        opened = self._open
        runners = {} if opened is None else opened.world.runners
        return tuple(_use(part, runner) for part, runner in runners.items())

    def close(self) -> None:
        """Free what is loaded."""
        if self._source is not None:
            self._source.close()


def _use(part: str, runner: GraphRunner) -> GraphUse:
    counts = runner.counts
    return GraphUse(
        part=part,
        replayed_count=counts.replays,
        recorded_count=counts.captures,
        plain_count=counts.plain,
        unlisted_count=counts.unlisted,
        refused_count=counts.failures,
        evicted_count=counts.evictions,
        entry_count=runner.entry_count,
        held_bytes=runner.size_bytes,
    )
