"""What goes into and comes out of an engine step.

Owns: `Control`, `Action`, `LatentChunk`, `StepTimings`, `WarmUpEvent`. Invariant: all are values;
nothing here changes after it was made.
Shape suffixes: F frames, A axes, B batch, C channels, T latent frames, H height, W width.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from engine.config import FRAMES_PER_LATENT
from engine.errors import ConfigError

FRAMES_PER_CHUNK = sum(FRAMES_PER_LATENT)
AXES = ("forward", "right", "yaw", "pitch", "boost")
"""Columns of `Action.axes_FA`. Yaw is positive to the right, pitch is positive upwards."""


class Control(StrEnum):
    """One thing that a person can hold."""

    FORWARD = "forward"
    BACK = "back"
    LEFT = "left"
    RIGHT = "right"
    LOOK_LEFT = "look_left"
    LOOK_RIGHT = "look_right"
    LOOK_UP = "look_up"
    LOOK_DOWN = "look_down"
    BOOST = "boost"


_CONTROL_AXES: dict[Control, tuple[int, float]] = {
    Control.FORWARD: (0, 1.0),
    Control.BACK: (0, -1.0),
    Control.RIGHT: (1, 1.0),
    Control.LEFT: (1, -1.0),
    Control.LOOK_RIGHT: (2, 1.0),
    Control.LOOK_LEFT: (2, -1.0),
    Control.LOOK_UP: (3, 1.0),
    Control.LOOK_DOWN: (3, -1.0),
    Control.BOOST: (4, 1.0),
}


@dataclass(frozen=True, eq=False, slots=True)
class Action:
    """Controls over one chunk: row f holds while frame f moves to frame f + 1.

    `axes_FA` is float64 [17, 5]: forward, right, yaw, pitch in [-1, 1] and boost in [0, 1].
    Raises: ConfigError for another shape, values outside the range or not finite.
    """

    axes_FA: npt.NDArray[np.float64]

    def __post_init__(self) -> None:
        shape = (FRAMES_PER_CHUNK, len(AXES))
        if self.axes_FA.shape != shape or self.axes_FA.dtype != np.float64:
            raise ConfigError(
                f"action axes are {self.axes_FA.dtype} {self.axes_FA.shape}; "
                f"allowed: float64 {shape}"
            )
        low = np.array([-1.0, -1.0, -1.0, -1.0, 0.0])
        if not np.all((self.axes_FA >= low) & (self.axes_FA <= 1.0)):
            raise ConfigError(
                "action axes have values that are not finite or out of range; allowed: "
                "-1..1 for forward, right, yaw, pitch and 0..1 for boost"
            )

    @classmethod
    def still(cls) -> Action:
        """Return the action of hands off the keys."""
        return cls(np.zeros((FRAMES_PER_CHUNK, len(AXES))))

    @classmethod
    def from_keys(cls, keys: Sequence[Collection[Control]]) -> Action:
        """Return the action of held controls, one collection a frame; opposite controls cancel.

        Raises: ConfigError unless there is one entry for each of the 17 frames.
        """
        if len(keys) != FRAMES_PER_CHUNK:
            raise ConfigError(f"keys cover {len(keys)} frames; allowed: exactly {FRAMES_PER_CHUNK}")
        axes_FA = np.zeros((FRAMES_PER_CHUNK, len(AXES)))
        for frame, held in enumerate(keys):
            for control in set(held):
                axis, value = _CONTROL_AXES[control]
                axes_FA[frame, axis] += value
        return cls(axes_FA)


class SpanClock(Protocol):
    """Marks points of a step; reading the distance between two may wait for the device."""

    def mark(self, name: str) -> None:
        """Remember now under ``name``."""
        ...

    def between_ms(self, first: str, second: str) -> float:
        """Milliseconds from one mark to another."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimings:
    """Spans of one step, complete after its commit. On CUDA reading waits, so read late."""

    clock: SpanClock
    steps: int

    @property
    def denoise_ms(self) -> tuple[float, ...]:
        """Each denoise step."""
        return tuple(
            self.clock.between_ms(f"step_{step}", f"step_{step + 1}") for step in range(self.steps)
        )

    @property
    def refresh_ms(self) -> float:
        """The refresh that writes keys and values of the finished chunk."""
        return self.clock.between_ms("refresh", "end")

    @property
    def latents_ms(self) -> float:
        """From the begin to the latents: camera, random draws and denoise steps."""
        return self.clock.between_ms("begin", f"step_{self.steps}")


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class LatentChunk:
    """Five latent frames, which a decoder turns into 17 frames."""

    chunk_index: int
    epoch: int
    latents_BCTHW: Tensor
    """fp32 [1, 24, 5, H, W], normalised as the decoder expects."""
    poses_F44: npt.NDArray[np.float64]
    """Camera-to-world of the 17 frames, relative to the first frame of the rollout."""
    timings: StepTimings


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmUpEvent:
    """Progress of `Engine.warm_up`."""

    done: int
    total: int
    label: str
    elapsed_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadEvent:
    """Progress of the weights on their way from disk."""

    done_bytes: int
    total_bytes: int
    elapsed_s: float

    @property
    def share(self) -> float:
        """Part that is done, 0 to 1."""
        return self.done_bytes / self.total_bytes if self.total_bytes else 1.0

    @property
    def gb_per_s(self) -> float:
        """Rate so far, in 10^9 bytes."""
        return self.done_bytes / 1e9 / max(self.elapsed_s, 1e-9)

    @property
    def left_s(self) -> float:
        """Time to go at that rate."""
        return (self.total_bytes - self.done_bytes) / 1e9 / max(self.gb_per_s, 1e-9)

    def __str__(self) -> str:
        """For people."""
        done, total = self.done_bytes / 1e9, self.total_bytes / 1e9
        return f"{done:.1f} of {total:.1f} GB, {self.gb_per_s:.1f} GB/s, {self.left_s:.0f} s left"
