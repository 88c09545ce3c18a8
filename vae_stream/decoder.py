"""What every streaming decoder is: latent frames in, pictures out, in order and without gaps.

Owns the interface, the state's form, the checks at the border. Decoders differ in when pictures
come: a causal one gives those of a latent at once, one that looks ahead keeps them until later
latents are there, or until `flush` says that none will come.
Invariants: state is an argument; the same input, order of calls and thread count give the same
bits; a latent gives 1 picture at a block's start, else 4, whatever the decoder, so that one may
take over from another at the border of a chunk.
Legend: B batch, T frames, C channels, H height, W width.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from graphs.runner import GraphRunner
from vae_stream.geometry import SPATIAL_RATIO, first_frame, frame_count


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameChunk:
    """Pictures of one latent frame."""

    frames_THWC: Tensor
    """uint8 RGB, 1 or 4 pictures."""
    first_frame: int
    """Absolute index of the first picture."""
    latent_index: int
    """Absolute index of the latent frame."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderSnapshot:
    """A point of a stream to go back to; nothing writes its tensors."""

    latent_index: int
    values: Mapping[str, int]
    tensors: Mapping[str, Tensor]


class DecoderState:
    """What changes while a stream is decoded.

    This form is for decoders that replace tensors and never write them in place; one with memory at
    fixed addresses overrides `snapshot` and `restore`, and copies.
    """

    __slots__ = ("finite", "latent_index", "tensors", "values")

    def __init__(self, latent_index: int, tensors: Mapping[str, Tensor]) -> None:
        if latent_index < 0:
            raise ValueError(f"first_latent: {latent_index}; allowed: 0 or more")
        self.latent_index = latent_index
        """Absolute index of the next latent to push."""
        self.values: dict[str, int] = {"is_flushed": 0}
        self.tensors = dict(tensors)
        self.finite = FiniteWatch()

    def snapshot(self) -> DecoderSnapshot:
        """Return the present point."""
        return DecoderSnapshot(
            latent_index=self.latent_index, values=dict(self.values), tensors=dict(self.tensors)
        )

    def restore(self, snapshot: DecoderSnapshot) -> None:
        """Go back (or on) to a snapshot of the same decoder, from whatever device.

        Raises:
            ValueError: it is of another decoder.
        """
        self._check(snapshot)
        self.latent_index = snapshot.latent_index
        self.values = dict(snapshot.values)
        # Only `to` keeps the layout in memory, which kernels choose by.
        self.tensors = {
            name: snapshot.tensors[name].to(tensor.device) for name, tensor in self.tensors.items()
        }

    def _check(self, snapshot: DecoderSnapshot) -> None:
        check_names("values", snapshot.values, self.values)
        check_names("tensors", snapshot.tensors, self.tensors)
        for name, tensor in self.tensors.items():
            if snapshot.tensors[name].shape != tensor.shape:
                raise ValueError(
                    f"snapshot: {name} has shape {tuple(snapshot.tensors[name].shape)}; "
                    f"allowed: {tuple(tensor.shape)}"
                )


class StreamingDecoder(Protocol):
    """Decodes normalised latent frames of one picture size; holds weights, states are arguments."""

    @property
    def name(self) -> str:
        """Network and mode, for people."""
        ...

    @property
    def height_px(self) -> int:
        """Height of the pictures."""
        ...

    @property
    def width_px(self) -> int:
        """Width of the pictures."""
        ...

    @property
    def lookahead_latents(self) -> int:
        """Latents of the next chunk that pictures of a chunk may wait for; 0: none ever waits."""
        ...

    @property
    def runner(self) -> GraphRunner | None:
        """What records calls, for its figures; None where each runs anew."""
        ...

    def new_state(self, first_latent: int = 0) -> DecoderState:
        """Return the state before latent `first_latent` of a stream that is new to this decoder.

        Raises:
            ValueError: negative; or not the start of a block, where the decoder needs one.
        """
        ...

    def push(self, state: DecoderState, latent_BCHW: Tensor) -> tuple[FrameChunk, ...]:
        """Take the next latent frame, move `state` on, return the pictures that are due.

        Args:
            state: of this decoder; unchanged when the latent is rejected.
            latent_BCHW: normalised, `[1, channels, height/16, width/16]`, fp32 or bf16.

        Returns the pictures of none, one or more latents, this one's or earlier ones', in order;
        their tensors are the caller's.

        Raises:
            ValueError: wrong state or shape, a flushed state, or a value that is not finite (on
                CUDA said at a later push, which nobody has to wait for).
        """
        ...

    def flush(self, state: DecoderState) -> tuple[FrameChunk, ...]:
        """End the stream: return the pictures that wait for latents which will not come.

        Raises:
            ValueError: it is flushed already.
        """
        ...

    def state_bytes(self) -> int:
        """Memory of one state, computed."""
        ...

    def close(self) -> None:
        """Give recorded passes and memory up, before the weights go; calling it again is fine."""
        ...


class _Question:
    """Whether a latent on a GPU is finite."""

    __slots__ = ("answer", "done", "index")

    def __init__(self) -> None:
        self.answer = torch.ones((), dtype=torch.bool).pin_memory()
        self.done = torch.cuda.Event()
        self.index = -1

    def ask(self, latent_BCHW: Tensor, index: int) -> None:
        self.index = index
        self.answer.copy_(torch.isfinite(latent_BCHW).all(), non_blocking=True)
        self.done.record(torch.cuda.current_stream(latent_BCHW.device))


class FiniteWatch:
    """Finds NaN and Inf without making a GPU wait: there answers are read at later pushes."""

    __slots__ = ("_idle", "_open")

    def __init__(self) -> None:
        self._open: deque[_Question] = deque()
        """As many as the GPU is behind."""
        self._idle: list[_Question] = []

    def check(self, latent_BCHW: Tensor, index: int) -> None:
        """Look at a latent.

        Raises:
            ValueError: it holds a value that is not finite, or one before did.
        """
        if latent_BCHW.device.type != "cuda":
            if not bool(torch.isfinite(latent_BCHW).all()):
                raise _not_finite(index)
            return
        while self._open and self._open[0].done.query():
            answered = self._open.popleft()
            self._idle.append(answered)
            if not bool(answered.answer):
                raise _not_finite(answered.index)
        question = self._idle.pop() if self._idle else _Question()
        question.ask(latent_BCHW, index)
        self._open.append(question)


def _not_finite(index: int) -> ValueError:
    return ValueError(f"latent_BCHW: NaN or Inf at latent {index}; allowed: finite values")


def latent_shape(channels: int, height_px: int, width_px: int) -> tuple[int, int, int, int]:
    """Return the shape `[1, C, H/16, W/16]` of latents for a picture size.

    Raises:
        ValueError: a size that 16 does not divide.
    """
    if height_px % SPATIAL_RATIO or width_px % SPATIAL_RATIO or min(height_px, width_px) <= 0:
        raise ValueError(
            f"height_px, width_px: {height_px}, {width_px}; "
            f"allowed: positive multiples of {SPATIAL_RATIO}"
        )
    return 1, channels, height_px // SPATIAL_RATIO, width_px // SPATIAL_RATIO


def check_latent(state: DecoderState, latent_BCHW: Tensor, shape: tuple[int, ...]) -> None:
    """Check what is pushed.

    Raises:
        ValueError: flushed state, other shape, or not finite.
    """
    if tuple(latent_BCHW.shape) != shape:
        raise ValueError(f"latent_BCHW: shape {tuple(latent_BCHW.shape)}; allowed: {shape}")
    check_open(state)
    state.finite.check(latent_BCHW, state.latent_index)


def check_open(state: DecoderState) -> None:
    """Check that a stream is not at its end.

    Raises:
        ValueError: it is.
    """
    if state.values["is_flushed"]:
        raise ValueError(
            f"state: flushed at latent {state.latent_index}; expected new_state() or restore()"
        )


def check_names(what: str, got: Mapping[str, object], expected: Mapping[str, object]) -> None:
    """Check the names of a snapshot's part.

    Raises:
        ValueError: one is missing or unknown.
    """
    if set(got) != set(expected):
        raise ValueError(f"snapshot: {what} {sorted(got)}; allowed: {sorted(expected)}")


def frame_chunk(frames_THWC: Tensor, latent_index: int) -> FrameChunk:
    """Return the pictures of a latent with their place in the stream.

    Raises:
        RuntimeError: a decoder made another number of them.
    """
    if frames_THWC.shape[0] != frame_count(latent_index):
        raise RuntimeError(
            f"latent {latent_index}: {frames_THWC.shape[0]} frames; "
            f"expected {frame_count(latent_index)}"
        )
    return FrameChunk(
        frames_THWC=frames_THWC, first_frame=first_frame(latent_index), latent_index=latent_index
    )
