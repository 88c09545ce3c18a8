"""What a leader tells its followers: the calls of an engine, as values that can be sent.

Owns their fields. Rollouts have numbers; tensors are in host memory.
Shape suffixes: B batch, C channels, T latent frames, H height, W width.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.rollout import RolloutSnapshot
from engine.text import PromptEncoding
from engine.types import Action


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class NewRollout:
    """`Engine.new_rollout`; rollouts have numbers."""

    rollout: int
    prompt: str
    encoding: PromptEncoding
    anchor_BCTHW: Tensor | None
    seed: int
    epoch: int


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class SetPrompt:
    """`Engine.set_prompt`."""

    rollout: int
    prompt: str
    encoding: PromptEncoding


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Denoise:
    """`Engine.denoise`."""

    rollout: int
    action: Action
    leading_BCTHW: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """`Engine.commit`."""

    rollout: int
    beside: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Settle:
    """`Engine.settle`."""

    rollout: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Undo:
    """`Engine.undo`."""

    rollout: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TakeSnapshot:
    """`Engine.snapshot`, for which the leader needs the heads of all."""

    rollout: int


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Restore:
    """`Engine.restore`."""

    rollout: int
    snapshot: RolloutSnapshot


@dataclass(frozen=True, kw_only=True, slots=True)
class Drop:
    """The leader has these rollouts no longer."""

    rollouts: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Close:
    """`Engine.close`; nothing comes after it."""


Call = (
    NewRollout
    | SetPrompt
    | Denoise
    | Commit
    | Settle
    | Undo
    | TakeSnapshot
    | Restore
    | Drop
    | Close
)
