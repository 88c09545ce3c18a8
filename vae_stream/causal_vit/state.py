"""What changes while the causal ViT decoder runs: the ring of keys and values, and its clock.

Owns the memory of streams, which has fixed addresses, so that recorded passes serve again: what a
stream leaves goes to the next one. Invariant: snapshots are copies of the latents that later ones
can see, oldest first, wherever in the ring they lie, so that equal futures have equal snapshots.

Legend: L layers, S slots, R tokens of a latent, D width, C latents, F latent channels.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from vae_stream.causal_vit.places import RING_SLOTS
from vae_stream.decoder import DecoderSnapshot, DecoderState, check_names
from vae_stream.recorded import Lender
from vae_stream.vit import VitConfig

_WAITING_LATENTS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class RingShape:
    """Sizes of the memory of one stream."""

    layers: int
    width: int
    channels: int
    height: int
    """Of the grid, in tokens."""
    width_tokens: int
    dtype: torch.dtype

    @property
    def tokens(self) -> int:
        """Of one latent."""
        return self.height * self.width_tokens

    @property
    def size_bytes(self) -> int:
        """Memory of one stream."""
        ring = self.layers * RING_SLOTS * self.tokens * self.width * self.dtype.itemsize
        return 2 * ring + 4 * _WAITING_LATENTS * self.channels * self.tokens + 2 * 8


def ring_shape(network: VitConfig, dtype: torch.dtype, *, height: int, width: int) -> RingShape:
    """Return the sizes of a stream's memory for a grid of `height` x `width` tokens."""
    return RingShape(
        layers=network.layer_count, width=network.width, channels=network.latent_channels,
        height=height, width_tokens=width, dtype=dtype,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class RingBuffers:
    """Memory of one stream."""

    keys_LSRD: Tensor
    values_LSRD: Tensor
    latents_CFHW: Tensor
    """fp32; the first one may wait for the next push."""
    clock_2: Tensor
    """int64, the first latent of the call and that of the stream."""

    @property
    def fixed(self) -> tuple[Tensor, ...]:
        """All of them, for what depends on their addresses."""
        return self.keys_LSRD, self.values_LSRD, self.latents_CFHW, self.clock_2


class RingLender(Lender[RingBuffers]):
    """Gives memory to streams, that of ended ones first."""

    def __init__(self, shape: RingShape, device: torch.device) -> None:
        super().__init__(partial(_ring_buffers, shape, device))
        self.shape = shape


def _ring_buffers(shape: RingShape, device: torch.device) -> RingBuffers:
    ring = (shape.layers, RING_SLOTS, shape.tokens, shape.width)
    latents = (_WAITING_LATENTS, shape.channels, shape.height, shape.width_tokens)
    return RingBuffers(
        keys_LSRD=torch.empty(ring, dtype=shape.dtype, device=device),
        values_LSRD=torch.empty(ring, dtype=shape.dtype, device=device),
        latents_CFHW=torch.zeros(latents, device=device),
        clock_2=torch.zeros(2, dtype=torch.int64, device=device),
    )


class CausalVitState(DecoderState):
    """A stream of the causal ViT decoder.

    Args:
        first_latent: absolute index of its first latent.
        lender: where its memory comes from, and goes when nobody holds the state any more.
        past: most latents that a call of the mode sees before its own.
    """

    def __init__(self, first_latent: int, *, lender: RingLender, past: int) -> None:
        super().__init__(first_latent, {})
        self.values |= {"first_latent": first_latent, "is_waiting": 0, "is_shown": 0}
        self.lender = lender
        self.buffers = lender.take()
        self._past = past
        self.buffers.clock_2[1].fill_(first_latent)
        weakref.finalize(self, lender.give, self.buffers)

    @property
    def next_latent(self) -> int:
        """Index of the first latent that is not in the ring for good."""
        return self.latent_index - self.values["is_waiting"]

    @property
    def place(self) -> int:
        """How many latents were pushed since the stream began."""
        return self.latent_index - self.values["first_latent"]

    def slots(self, past: int, latents: int) -> list[int]:
        """Return the slots that a call of that many latents sees, oldest first, its own last."""
        held = min(self.next_latent - self.values["first_latent"], past)
        begin = self.next_latent - held
        return [(begin + index) % RING_SLOTS for index in range(held + latents)]

    def snapshot(self) -> DecoderSnapshot:
        """Return a copy of what later latents can see, and of the latent that waits."""
        slots, buffers = self.slots(self._past, 0), self.buffers
        keys_LSRD, values_LSRD = (
            torch.stack([ring[:, slot] for slot in slots], dim=1) if slots else ring[:, :0].clone()
            for ring in (buffers.keys_LSRD, buffers.values_LSRD)
        )
        waiting_CFHW = buffers.latents_CFHW[: self.values["is_waiting"]].clone()
        return DecoderSnapshot(
            latent_index=self.latent_index,
            values=dict(self.values),
            tensors={"keys": keys_LSRD, "values": values_LSRD, "waiting": waiting_CFHW},
        )

    def restore(self, snapshot: DecoderSnapshot) -> None:
        """Go back (or on) to a snapshot of the same decoder, from whatever device.

        Raises:
            ValueError: it is of another decoder.
        """
        shape, tensors = self.lender.shape, snapshot.tensors
        check_names("values", snapshot.values, self.values)
        check_names("tensors", tensors, dict.fromkeys(("keys", "values", "waiting")))
        waiting = snapshot.values["is_waiting"]
        begun = snapshot.latent_index - waiting - snapshot.values["first_latent"]
        ring = (shape.layers, min(begun, self._past), shape.tokens, shape.width)
        latents = (waiting, shape.channels, shape.height, shape.width_tokens)
        for name, allowed in (("keys", ring), ("values", ring), ("waiting", latents)):
            if tuple(tensors[name].shape) != allowed:
                raise ValueError(
                    f"snapshot: {name} has shape {tuple(tensors[name].shape)}; allowed: {allowed}"
                )
        self.latent_index, self.values = snapshot.latent_index, dict(snapshot.values)
        buffers = self.buffers
        for index, slot in enumerate(self.slots(self._past, 0)):
            buffers.keys_LSRD[:, slot].copy_(tensors["keys"][:, index])
            buffers.values_LSRD[:, slot].copy_(tensors["values"][:, index])
        buffers.latents_CFHW[:waiting].copy_(tensors["waiting"])
        buffers.clock_2[1].fill_(self.values["first_latent"])
