"""TAEH3, the public tiny autoencoder for H3 latents, one latent or frame at a time.

Owns the network under its released parameter names, and its memories. It belongs to the TAEHV
family: convolutions per frame, memory blocks that also see the frame before, `grow` that makes two
frames of one and `pool` that makes one of two. Latents are normalised, pixels are in 0..1.
Invariants: the decoder's memories go on over block borders, where 3 of 4 raw frames are left out;
the encoder's begin anew every 17 frames, with 3 black frames in front. Memories and frames that
wait in a pool are never written in place.

    decoder  tanh limit -> 1/16, 256 wide -> 1/8, 128 -> grow -> 1/4, 64 -> grow -> 1/2, 64 -> 2x2
    encoder  2x2 -> 1/2, 64 wide -> pool -> 1/4 -> pool -> 1/8 -> 1/16 -> 24 wide

Source: github.com/madebyollin/taehv. Shape suffixes: 1 or T consecutive frames of one stream,
C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vae_stream.geometry import BLOCK_FRAMES, SPATIAL_RATIO, TRIM_FRAMES
from vae_stream.weight_files import WeightFiles

_LATENT_BOUND = 3.0
_COLOURS = 3
_Kept = Literal["all", "last", "none"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Taeh3Config:
    """Sizes; the defaults are the released model."""

    latent_channels: int = 24
    decoder_widths: tuple[int, int, int, int] = (256, 128, 64, 64)
    """Channels at 1/16, 1/8, 1/4 and 1/2 of the picture."""
    encoder_width: int = 64
    patch: int = 2
    """Pixels a side that the last and first convolution see as channels."""


class MemoryBlock(nn.Module):
    """Residual block over a frame and the frame before, which is its memory."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            _conv(2 * width, width), nn.ReLU(), _conv(width, width), nn.ReLU(), _conv(width, width)
        )

    def forward(self, x_1CHW: Tensor, before_1CHW: Tensor) -> Tensor:
        """Run a frame; `before_1CHW` is what this block was given for the frame before."""
        return F.relu(self.conv(torch.cat([x_1CHW, before_1CHW], dim=1)) + x_1CHW)


class Grow(nn.Module):
    """Makes `stride` frames of each."""

    def __init__(self, width: int, stride: int) -> None:
        super().__init__()
        self._stride = stride
        self.conv = nn.Conv2d(width, width * stride, 1, bias=False)

    def forward(self, x_1CHW: Tensor) -> tuple[Tensor, ...]:
        """Return the frames in order."""
        return self.conv(x_1CHW).chunk(self._stride, dim=1)


class Pool(nn.Module):
    """Makes one frame of `stride`."""

    def __init__(self, width: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.conv = nn.Conv2d(width * stride, width, 1, bias=False)

    def forward(self, frames_1CHW: Sequence[Tensor]) -> Tensor:
        """Return one frame of `stride` in order."""
        return self.conv(torch.cat(list(frames_1CHW), dim=1))


class _Limit(nn.Module):
    def forward(self, x_TCHW: Tensor) -> Tensor:
        return torch.tanh(x_TCHW / _LATENT_BOUND) * _LATENT_BOUND


def _conv(width_in: int, width_out: int, *, stride: int = 1, bias: bool = True) -> nn.Conv2d:
    return nn.Conv2d(width_in, width_out, 3, stride=stride, padding=1, bias=bias)


def _blocks(width: int) -> Iterator[nn.Module]:
    return (MemoryBlock(width) for _ in range(3))


class Taeh3(nn.Module):
    """Decoder and encoder; places in the two lists are part of the released parameter names."""

    name = "TAEH3"

    def __init__(self, config: Taeh3Config) -> None:
        super().__init__()
        self.config = config
        w16, w8, w4, w2 = config.decoder_widths
        pixels = _COLOURS * config.patch**2
        self.decoder = nn.Sequential(
            _Limit(), _conv(config.latent_channels, w16), nn.ReLU(), *_blocks(w16),
            nn.Upsample(scale_factor=2), Grow(w16, 1), _conv(w16, w8, bias=False), *_blocks(w8),
            nn.Upsample(scale_factor=2), Grow(w8, 2), _conv(w8, w4, bias=False), *_blocks(w4),
            nn.Upsample(scale_factor=2), Grow(w4, 2), _conv(w4, w2, bias=False), nn.ReLU(),
            _conv(w2, pixels),
        )  # fmt: skip
        self._last_memory = max(
            at for at, layer in enumerate(self.decoder) if isinstance(layer, MemoryBlock)
        )
        width = config.encoder_width
        self.encoder = nn.Sequential(_conv(pixels, width), nn.ReLU())
        for stride in (2, 2, 1):
            self.encoder.extend(
                [Pool(width, stride), _conv(width, width, stride=2, bias=False), *_blocks(width)]
            )
        self.encoder.append(_conv(width, config.latent_channels))

    @property
    def latent_channels(self) -> int:
        """Channels of a latent."""
        return self.config.latent_channels

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._weight.device

    @property
    def _weight(self) -> Tensor:
        first = self.decoder[1].weight
        assert isinstance(first, Tensor)
        return first

    @property
    def _memory_format(self) -> torch.memory_format:
        # On a CPU channels-last is slower for widths like these.
        is_cuda = self._weight.device.type == "cuda"
        return torch.channels_last if is_cuda else torch.contiguous_format

    def prepare_streaming(self) -> None:
        """Lay the weights out as `step` is fastest with."""
        self.to(memory_format=self._memory_format)  # type: ignore[call-overload]

    def empty_memories(self, height: int, width: int) -> dict[str, Tensor]:
        """Return the decoder's memories before the first latent, by place of their block."""
        like, memories, scale = self._weight, {}, 1
        for place, layer in enumerate(self.decoder):
            if isinstance(layer, nn.Upsample):
                scale *= 2
            elif isinstance(layer, MemoryBlock):
                channels = layer.conv[4].out_channels
                assert isinstance(channels, int)
                shape = (1, channels, height * scale, width * scale)
                memories[_memory_name(place)] = like.new_zeros(shape).contiguous(
                    memory_format=self._memory_format
                )
        return memories

    def step(
        self, latent_1CHW: Tensor, memories: Mapping[str, Tensor], *, last_frame_only: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Decode one latent to 4 raw frames `[T, 3, 16H, 16W]`, or only the last of them.

        Returns the frames and the memories after them, which `last_frame_only` does not change.
        """
        after = dict(memories)
        x_1CHW = latent_1CHW.to(self._weight.dtype, memory_format=self._memory_format)
        frames = list(self._decode_from(0, x_1CHW, after, "last" if last_frame_only else "all"))
        return F.pixel_shuffle(torch.cat(frames), self.config.patch), after

    def _decode_from(
        self, place: int, x_1CHW: Tensor, memories: dict[str, Tensor], kept: _Kept
    ) -> Iterator[Tensor]:
        """Run a frame from a layer on; each frame that it grows into goes to the end in turn.

        Of frames that are not kept only the memories remain.
        """
        for at in range(place, len(self.decoder)):
            if kept == "none" and at > self._last_memory:
                return
            layer = self.decoder[at]
            if isinstance(layer, MemoryBlock):
                name = _memory_name(at)
                memories[name], x_1CHW = x_1CHW, layer(x_1CHW, memories[name])
            elif isinstance(layer, Grow):
                *earlier, last = layer(x_1CHW)
                for frame in earlier:
                    not_last: _Kept = "all" if kept == "all" else "none"
                    yield from self._decode_from(at + 1, frame, memories, not_last)
                yield from self._decode_from(at + 1, last, memories, kept)
                return
            else:
                x_1CHW = layer(x_1CHW)
        yield x_1CHW

    def encode_frame(
        self, frame_1CHW: Tensor, state: Mapping[str, Tensor], index: int
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Encode one frame of a stream, 0..1.

        Args:
            frame_1CHW: `[1, 3, 16H, 16W]`.
            state: what the call before returned; empty before the first frame.
            index: of the frame in the stream.

        Returns the latent `[1, C, H, W]` that is complete with this frame, or None, and the state.
        """
        x_1CHW = frame_1CHW.to(self._weight.dtype, memory_format=self._memory_format)
        is_start = index % BLOCK_FRAMES == 0
        after = {} if is_start else dict(state)
        if is_start:
            for _ in range(TRIM_FRAMES):
                self._encode(torch.zeros_like(x_1CHW), after)
        return self._encode(x_1CHW, after), after

    def _encode(self, x_1CHW: Tensor, state: dict[str, Tensor]) -> Tensor | None:
        x_1CHW = F.pixel_unshuffle(x_1CHW, self.config.patch)
        for place, layer in enumerate(self.encoder):
            if isinstance(layer, MemoryBlock):
                name = _memory_name(place)
                before = state.get(name)
                before = torch.zeros_like(x_1CHW) if before is None else before
                state[name], x_1CHW = x_1CHW, layer(x_1CHW, before)
            elif isinstance(layer, Pool):
                name = f"waiting_{place:02}"
                if layer.stride > 1 and name not in state:
                    state[name] = x_1CHW
                    return None
                waiting = [state.pop(name)] if name in state else []
                x_1CHW = layer([*waiting, x_1CHW])
            else:
                x_1CHW = layer(x_1CHW)
        return x_1CHW

    def encode_picture(self, rgb_1CHW: Tensor) -> Tensor:
        """Return the normalised fp32 latent `[1, C, 1, H, W]` of one picture in 0..1."""
        latent_1CHW, _ = self.encode_frame(rgb_1CHW.to(self.device), {}, 0)
        assert latent_1CHW is not None
        return latent_1CHW.float().unsqueeze(2)


def _memory_name(place: int) -> str:
    return f"memory_{place:02}"


def is_taeh3(names: Container[str]) -> bool:
    """Tell whether tensors are of this family."""
    return "decoder.22.weight" in names and "decoder.3.conv.0.weight" in names


def empty_taeh3(files: WeightFiles) -> Taeh3:
    """Return the network of `files` without memory; heads alone are read.

    Raises:
        ValueError: a tensor is missing, left over, of another dtype, or of a shape that fits no H3
            latents.
    """
    with torch.device("meta"):
        network = Taeh3(_config(files))
    files.check({name: tuple(each.shape) for name, each in network.named_parameters()})
    return network


@torch.no_grad()
def load_taeh3(
    files: WeightFiles, *, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Taeh3:
    """Read the network.

    Raises:
        ValueError: as `empty_taeh3`, before there is memory for any weight; or a file is damaged.
    """
    network = empty_taeh3(files).to(dtype).to_empty(device=device)
    for name, parameter in network.named_parameters():
        parameter.copy_(files.read(name))
    return network.eval().requires_grad_(False)


def _config(files: WeightFiles) -> Taeh3Config:
    def size(name: str, axis: int) -> int:
        if name not in files.shapes:
            raise ValueError(f"{files.source}: lacks {name}")
        return files.shapes[name][axis]

    pixels = size("decoder.22.weight", 0)
    patch = round((pixels / _COLOURS) ** 0.5)
    if _COLOURS * patch**2 != pixels or 8 * patch != SPATIAL_RATIO:
        raise ValueError(
            f"{files.file_of('decoder.22.weight')}: decoder.22.weight makes {pixels} channels; "
            f"expected {_COLOURS * (SPATIAL_RATIO // 8) ** 2}, as of TAEH3"
        )
    w16, w8, w4, w2 = (size(f"decoder.{place}.weight", 0) for place in (1, 8, 14, 20))
    return Taeh3Config(
        latent_channels=size("decoder.1.weight", 1),
        decoder_widths=(w16, w8, w4, w2),
        encoder_width=size("encoder.0.weight", 0),
        patch=patch,
    )
