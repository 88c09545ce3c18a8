"""Where tokens of the causal ViT decoder are: windows in space, the ring in time, rotary tables.

Owns the partition of a grid into windows, the clock of a stream and what follows from it. Windows
lie on a grid of `window` tokens, moved by half of that on every other layer; those at the rim hold
fewer tokens, but positions in them are still divided by `window`. Time counts latents from the
start of the stream and never ends: angles are float64 revolutions without their whole part, so that
precision stays, and tables do not depend on when the stream began.

    ring of six slots, latent n in slot n mod 6; a call sees its `past` last latents and its own
    [n-4 | n-3 | n-2 | n-1 | own n | own n+1]   oldest first, whatever slot each is in

Legend: C latents of a call, R tokens of a latent (with the suffix: rows of a call), W windows,
J places of a window, S slots, A rotary pairs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vae_stream.vit import VitConfig

RING_SLOTS = 6
"""A pair and the four latents before it; or one latent and five."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CausalConfig:
    """How the network is used; the defaults are those it was trained with."""

    window: int = 16
    """Tokens along each side of a window."""
    time_span: float = 7.0
    """Latents that positions in time are divided by."""

    def __post_init__(self) -> None:
        if self.window < 2 or self.window % 2:
            raise ValueError(f"window: {self.window}; allowed: even numbers from 2")

    def shift(self, layer: int) -> int:
        """Return by how many tokens the windows of a layer are moved."""
        return self.window // 2 if layer % 2 else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class CallKind:
    """What one call decodes and sees."""

    latents: int
    """Decoded together; each sees all of them."""
    past: int
    """Latents before them that they see, where the stream has as many."""
    suffix_back: int
    """How many latents before the first one the suffix is placed in time."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class WindowPlan:
    """The windows of one shift, row by row; tokens in raster order within each."""

    token_WJ: Tensor
    """int32 index of the token at each place; 0 where there is none."""
    size_W: Tensor
    """int32 number of tokens, which take the first places."""
    begin_W: Tensor
    """int32 row of the ring that holds a window's first token: there, window follows window."""
    place_R: Tensor
    """int64 place of each token, counted through all windows."""
    ring_R: Tensor
    """int64 row of the ring that holds each token."""
    cos_RA: Tensor
    """fp32 rotary tables of row and column, [R, 2/3 A]."""
    sin_RA: Tensor


def plan_windows(
    height: int,
    width: int,
    shift: int,
    *,
    network: VitConfig,
    causal: CausalConfig,
    device: torch.device | str = "cpu",
) -> WindowPlan:
    """Divide a grid of `height` x `width` tokens into windows."""
    side = causal.window
    row_R = torch.arange(height).repeat_interleave(width) + shift
    col_R = torch.arange(width).repeat(height) + shift
    window_R = row_R // side * ((width - 1 + shift) // side + 1) + col_R // side
    size_W = window_R.bincount()
    order_R = window_R.argsort(stable=True)
    begin_W = size_W.cumsum(0) - size_W
    ring_R = torch.empty_like(order_R)
    ring_R[order_R] = torch.arange(len(order_R))
    place_R = ring_R - begin_W[window_R] + window_R * side**2
    token_WJ = torch.zeros(len(size_W), side**2, dtype=torch.int32)
    token_WJ.view(-1)[place_R] = torch.arange(len(place_R), dtype=torch.int32)
    angles = [
        _angles(2.0 * (at_R % side + 0.5) / side - 1.0, frequencies(network))
        for at_R in (row_R, col_R)
    ]
    angle_RA = torch.cat(angles, dim=1)
    return WindowPlan(
        token_WJ=token_WJ.to(device),
        size_W=size_W.to(device, torch.int32),
        begin_W=begin_W.to(device, torch.int32),
        place_R=place_R.to(device),
        ring_R=ring_R.to(device),
        cos_RA=angle_RA.cos().to(device, torch.float32),
        sin_RA=angle_RA.sin().to(device, torch.float32),
    )


def frequencies(network: VitConfig) -> Tensor:
    """Return the float64 frequencies of one axis, in revolutions per unit of position."""
    count = network.rotary_width // 6
    return network.theta ** -(torch.arange(count, dtype=torch.float64) / count)


class Moment(NamedTuple):
    """All of a call that follows from its time."""

    slots_S: Tensor
    """int64 slots that are seen, oldest latent first; those from `count` on mean nothing."""
    count_1: Tensor
    """int64 number of slots that are seen, those of the call itself included."""
    own_C: Tensor
    """int64 slots of the call itself."""
    tables: tuple[tuple[Tensor, Tensor], ...]
    """fp32 cosines and sines [C*R + suffix, A] of each plan."""


def moment(
    clock_2: Tensor,
    kind: CallKind,
    plans: tuple[WindowPlan, ...],
    frequency_A: Tensor,
    *,
    time_span: float,
    suffix_rows: int,
) -> Moment:
    """Derive slots and tables on the device of the clock; nothing is read back.

    Args:
        clock_2: int64, the first latent of the call and that of the stream.
        kind: of the call.
        plans: one a shift.
        frequency_A: float64, see `frequencies`.
        time_span: see `CausalConfig`.
        suffix_rows: rows after the tokens.
    """
    now_1, first_1 = clock_2.split(1)
    held_1 = (now_1 - first_1).clamp(max=kind.past)
    slot_S = torch.arange(RING_SLOTS, device=clock_2.device)
    latent_C = now_1 + slot_S[: kind.latents]
    suffix_1 = torch.maximum(now_1 - kind.suffix_back, first_1)
    angle_CA = _angles(_position(latent_C, time_span), frequency_A)
    suffix_1A = _angles(_position(suffix_1, time_span), frequency_A)
    tables = []
    for plan in plans:
        pairs = []
        for space_RA, time_CA, time_1A, at_zero in (
            (plan.cos_RA, angle_CA.cos(), suffix_1A.cos(), 1.0),
            (plan.sin_RA, angle_CA.sin(), suffix_1A.sin(), 0.0),
        ):
            tokens = space_RA.shape[0]
            rows_CRA = torch.cat(
                [
                    time_CA.float()[:, None].expand(-1, tokens, -1),
                    space_RA[None].expand(kind.latents, -1, -1),
                ],
                dim=-1,
            )
            space_1A = torch.full_like(space_RA[:1], at_zero)
            suffix_SA = torch.cat([time_1A.float(), space_1A], dim=-1).expand(suffix_rows, -1)
            pairs.append(torch.cat([rows_CRA.flatten(0, 1), suffix_SA]))
        tables.append((pairs[0], pairs[1]))
    return Moment(
        slots_S=(now_1 - held_1 + slot_S) % RING_SLOTS,
        count_1=held_1 + kind.latents,
        own_C=latent_C % RING_SLOTS,
        tables=tuple(tables),
    )


def _position(latent: Tensor, time_span: float) -> Tensor:
    return 2.0 * (latent.double() + 0.5) / time_span - 1.0


def _angles(position_R: Tensor, frequency_A: Tensor) -> Tensor:
    """Return float64 angles [R, A] below one turn."""
    turns_RA = position_R.double()[:, None] * frequency_A
    return 2.0 * math.pi * (turns_RA - turns_RA.floor())
