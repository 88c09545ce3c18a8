"""The tiny causal video autoencoder, in the grammar of TAEHV (memory blocks, grow, pool).

Owns: the network, its config, its explicit streaming state.
Invariants: parallel in time (training) and step by step (streaming) are the same function; a later
latent never enters an earlier frame; the encoder sees each 17-frame block alone; latents outside
this module are normalised per channel by the config's mean and std, in fp32.

Legend: B batch, T latent frames or frames, N = B * T, C channels, H height, W width.

    encoder  unshuffle 4 -> [1/4] memory -> pool -> [1/8] memory -> pool -> [1/16] memory -> 24
    decoder  24 -> [1/16] memory -> [1/8] memory -> grow -> [1/4] memory -> grow
             -> shuffle 2 -> [1/2] two convolutions, so that no 4-px grid is visible -> shuffle 2

Differences from TAEHV, all without cost in quality: a memory block keeps the product of the past
half of its first convolution instead of the past frame (same maths, no concatenation); grow and
pool are merged into the convolution beside them (both are linear).
Source: github.com/madebyollin/taehv
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from einops import rearrange
from safetensors.torch import save_file
from torch import Tensor, nn

from vae_stream.geometry import BLOCK_FRAMES, BLOCK_LATENTS, RAW_FRAMES, SPATIAL_RATIO, TRIM_FRAMES
from vae_stream.weight_files import WeightFiles

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
_ENCODER_PATCH = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class TinyVaeConfig:
    """Shape of the network and statistics of its latents; stored as json beside the weights."""

    latent_channels: int = 24
    """Channels of a latent."""
    decoder_widths: tuple[int, int, int] = (128, 64, 64)
    """Channels at 1/16, 1/8 and 1/4 of the picture."""
    decoder_blocks: tuple[int, int, int] = (3, 3, 1)
    """Memory blocks at 1/16, 1/8 and 1/4."""
    head_width: int = 16
    """Channels at 1/2."""
    encoder_widths: tuple[int, int, int] = (64, 64, 128)
    """Channels at 1/4, 1/8 and 1/16."""
    encoder_blocks: tuple[int, int, int] = (1, 2, 2)
    """Memory blocks at 1/4, 1/8 and 1/16."""
    latent_bound: float = 3.0
    """Latents before normalisation are bound * tanh(z / bound)."""
    latents_mean: tuple[float, ...] = (0.0,) * 24
    """Mean of each channel before normalisation."""
    latents_std: tuple[float, ...] = (1.0,) * 24
    """Standard deviation of each channel before normalisation."""

    def __post_init__(self) -> None:
        for name in ("latents_mean", "latents_std"):
            if len(getattr(self, name)) != self.latent_channels:
                raise ValueError(
                    f"{name}: {len(getattr(self, name))} values; allowed: {self.latent_channels}"
                )
        if min(self.latents_std) <= 0:
            raise ValueError(f"latents_std: {min(self.latents_std)}; allowed: above 0")

    @classmethod
    def from_json(cls, text: str) -> TinyVaeConfig:
        """Read a config; every key must be present and known.

        Raises:
            ValueError: no json object, or a key is missing or unknown.
        """
        raw = json.loads(text)
        names = {field.name for field in fields(cls)}
        if not isinstance(raw, dict) or set(raw) != names:
            found = sorted(set(raw) ^ names) if isinstance(raw, dict) else type(raw).__name__
            raise ValueError(f"config: missing or unknown {found}; allowed: {sorted(names)}")
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in raw.items()}
        return cls(**values)

    def to_json(self) -> str:
        """Write the config as json."""
        return json.dumps(asdict(self), indent=1) + "\n"


def _conv(width_in: int, width_out: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(width_in, width_out, 3, stride=stride, padding=1)


def _initialise(network: nn.Module) -> None:
    """Keep activations at one scale; memory blocks start near the identity.

    With torch's default the latents start far below the training noise, and learning is slow.
    Weights without memory have nothing to keep; drawing them would load the compiler, for 2 s.
    """
    for name, module in network.named_modules():
        if isinstance(module, nn.Conv2d) and not module.weight.is_meta:
            nn.init.kaiming_normal_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
            if name.endswith(".out"):
                module.weight.data.mul_(0.2)


class MemoryBlock(nn.Module):
    """Residual block that sees the frame before: y = relu(x + out(relu(now(x) + past(x before)))).

    The state is `past` of the last frame, zero at the start.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.now = _conv(width, width)
        self.past = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.out = _conv(width, width)

    def forward(self, x_NCHW: Tensor, past_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        """Run T = N / B consecutive frames; return them and the state after the last."""
        next_NCHW = self.past(x_NCHW)
        batch = past_BCHW.shape[0]
        past_BCHW = past_BCHW.to(next_NCHW.dtype)  # fp32 zeros under autocast
        if batch == x_NCHW.shape[0]:
            shifted_NCHW, last_BCHW = past_BCHW, next_NCHW
        else:
            next_BTCHW = next_NCHW.unflatten(0, (batch, -1))
            shifted_BTCHW = torch.cat([past_BCHW.unsqueeze(1), next_BTCHW[:, :-1]], dim=1)
            shifted_NCHW, last_BCHW = shifted_BTCHW.flatten(0, 1), next_BTCHW[:, -1]
        return F.relu(x_NCHW + self.out(F.relu(self.now(x_NCHW) + shifted_NCHW))), last_BCHW


def _grow(x_NCHW: Tensor) -> Tensor:
    """Split channels into two consecutive frames: [N, 2C, H, W] -> [2N, C, H, W]."""
    return x_NCHW.unflatten(1, (2, -1)).flatten(0, 1)


def _pool(x_NCHW: Tensor) -> Tensor:
    """Join two consecutive frames on the channel axis: [2N, C, H, W] -> [N, 2C, H, W]."""
    return x_NCHW.unflatten(0, (-1, 2)).flatten(1, 2)


def pixel_shuffle(x_NCHW: Tensor) -> Tensor:
    """Spread channels [row, column, C] over 2x2 pixels: [N, 4C, H, W] -> [N, C, 2H, 2W].

    This channel order moves whole runs of C values of a channels-last tensor: 0.05 ms instead of
    the 0.31 ms of torch's order [C, row, column], for 16 channels at half resolution on one core.
    """
    return rearrange(x_NCHW, "n (row col c) h w -> n c (h row) (w col)", row=2, col=2)


class Decoder(nn.Module):
    """Latents to frames, causal, with one frame of memory a block."""

    def __init__(self, config: TinyVaeConfig) -> None:
        super().__init__()
        coarse, middle, fine = config.decoder_widths
        counts = config.decoder_blocks
        self.config = config
        self.stem = _conv(config.latent_channels, coarse)
        self.coarse = nn.ModuleList(MemoryBlock(coarse) for _ in range(counts[0]))
        self.to_middle = _conv(coarse, middle)
        self.middle = nn.ModuleList(MemoryBlock(middle) for _ in range(counts[1]))
        self.to_fine = _conv(middle, 2 * fine)
        self.fine = nn.ModuleList(MemoryBlock(fine) for _ in range(counts[2]))
        self.to_half = _conv(fine, 2 * 4 * config.head_width)
        self.head = _conv(config.head_width, config.head_width)
        self.pixels = _conv(config.head_width, 12)
        _initialise(self)
        self.pixels.weight.data.mul_(0.2)  # start near plain grey
        nn.init.constant_(cast(Tensor, self.pixels.bias), 0.5)

    def zero_state(self, batch: int, height: int, width: int) -> list[Tensor]:
        """Return empty memories for latents of `height` x `width`."""
        shapes = [
            (width_c, 2**level)
            for level, (width_c, count) in enumerate(
                zip(self.config.decoder_widths, self.config.decoder_blocks, strict=True)
            )
            for _ in range(count)
        ]
        like = self.stem.weight
        return [like.new_zeros(batch, c, height * s, width * s) for c, s in shapes]

    def forward(
        self, latents_BTCHW: Tensor, state: Sequence[Tensor], *, last_frame_only: bool = False
    ) -> tuple[Tensor, list[Tensor]]:
        """Decode T latents (before normalisation) to raw frames `[B, 4T, 3, 16H, 16W]` in 0..1.

        With `last_frame_only`, T is 1 and only the 4th raw frame is made, `[B, 1, 3, 16H, 16W]`:
        the rest of the head is skipped, the state is the same.
        """
        batch = latents_BTCHW.shape[0]
        memories = iter(state)
        after: list[Tensor] = []

        def run(blocks: nn.ModuleList, x_NCHW: Tensor) -> Tensor:
            for block in blocks:
                x_NCHW, last = block(x_NCHW, next(memories))
                after.append(last)
            return x_NCHW

        x_NCHW = F.relu(self.stem(latents_BTCHW.flatten(0, 1)))
        x_NCHW = run(self.coarse, x_NCHW)
        x_NCHW = run(self.middle, _upsample(self.to_middle, x_NCHW))
        x_NCHW = run(self.fine, _grow(_upsample(self.to_fine, x_NCHW)))
        if last_frame_only:
            weight, bias = self.to_half.weight, self.to_half.bias
            half = weight.shape[0] // 2
            x_NCHW = F.conv2d(
                x_NCHW[1::2], weight[half:], None if bias is None else bias[half:], padding=1
            )
        else:
            x_NCHW = _grow(self.to_half(x_NCHW))
        x_NCHW = F.relu(pixel_shuffle(x_NCHW))
        x_NCHW = F.relu(self.head(x_NCHW))
        x_NCHW = pixel_shuffle(self.pixels(x_NCHW))
        return x_NCHW.unflatten(0, (batch, -1)), after


def _upsample(conv: nn.Conv2d, x_NCHW: Tensor) -> Tensor:
    """Nearest x2, then `conv`.

    Four 2x2 phase convolutions would save 2 % of a decode: not worth a second form of the weights.
    """
    return cast(Tensor, conv(F.interpolate(x_NCHW, scale_factor=2.0)))


class Encoder(nn.Module):
    """Frames of one block to its latents; memories start empty at each block."""

    def __init__(self, config: TinyVaeConfig) -> None:
        super().__init__()
        fine, middle, coarse = config.encoder_widths
        counts = config.encoder_blocks
        self.stem = _conv(3 * _ENCODER_PATCH**2, fine)
        self.fine = nn.ModuleList(MemoryBlock(fine) for _ in range(counts[0]))
        self.to_middle = _conv(2 * fine, middle, stride=2)
        self.middle = nn.ModuleList(MemoryBlock(middle) for _ in range(counts[1]))
        self.to_coarse = _conv(2 * middle, coarse, stride=2)
        self.coarse = nn.ModuleList(MemoryBlock(coarse) for _ in range(counts[2]))
        self.latents = _conv(coarse, config.latent_channels)
        _initialise(self)
        self.latents.weight.data.mul_(3.0)  # latents of order one, well above the training noise

    def forward(self, frames_BTCHW: Tensor) -> Tensor:
        """Encode T frames (a multiple of 4, centred on 0); unbounded `[B, T/4, C, H/16, W/16]`."""
        batch = frames_BTCHW.shape[0]
        x_NCHW = F.pixel_unshuffle(frames_BTCHW.flatten(0, 1), _ENCODER_PATCH)
        x_NCHW = _run_from_zero(self.fine, F.relu(self.stem(x_NCHW)), batch)
        x_NCHW = _run_from_zero(self.middle, F.relu(self.to_middle(_pool(x_NCHW))), batch)
        x_NCHW = _run_from_zero(self.coarse, F.relu(self.to_coarse(_pool(x_NCHW))), batch)
        return self.latents(x_NCHW).unflatten(0, (batch, -1))


def _run_from_zero(blocks: nn.ModuleList, x_NCHW: Tensor, batch: int) -> Tensor:
    for block in blocks:
        x_NCHW, _ = block(x_NCHW, x_NCHW.new_zeros(batch, *x_NCHW.shape[1:]))
    return x_NCHW


class TinyVae(nn.Module):
    """Encoder and decoder with the statistics of their latents."""

    name = "tiny"
    latents_mean: Tensor
    latents_std: Tensor

    def __init__(self, config: TinyVaeConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)
        for name in ("latents_mean", "latents_std"):
            values = torch.tensor(getattr(config, name), dtype=torch.float32)
            self.register_buffer(name, values[:, None, None], persistent=False)

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> TinyVae:
        """Read `config.json` and `model.safetensors` of a folder; the networks get `dtype`.

        Raises:
            ValueError: the config or a tensor's name or shape does not fit.
            FileNotFoundError: a file is missing.
        """
        config, files = check_tiny_vae(Path(source))
        vae = cls(config)
        vae.load_state_dict({name: files.read(name) for name in files.shapes})
        return vae.cast(dtype).to(device).eval().requires_grad_(False)

    def save_pretrained(self, target: str | Path, *, dtype: torch.dtype = torch.bfloat16) -> None:
        """Write `config.json` and `model.safetensors`, each through a temporary name."""
        folder = Path(target)
        folder.mkdir(parents=True, exist_ok=True)
        config = replace(
            self.config,
            latents_mean=tuple(self.latents_mean.flatten().tolist()),
            latents_std=tuple(self.latents_std.flatten().tolist()),
        )
        tensors = {
            k: v.detach().to("cpu", dtype).contiguous() for k, v in self.state_dict().items()
        }
        for name in (WEIGHTS_FILE, CONFIG_FILE):
            part = folder / f"{name}.part"
            if name == CONFIG_FILE:
                part.write_text(config.to_json(), encoding="utf-8")
            else:
                save_file(tensors, part)
            part.replace(folder / name)

    def cast(self, dtype: torch.dtype) -> TinyVae:
        """Set the dtype of the networks; the statistics stay fp32."""
        self.encoder.to(dtype)
        self.decoder.to(dtype)
        return self

    @property
    def latent_channels(self) -> int:
        """Channels of a latent."""
        return self.config.latent_channels

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.decoder.stem.weight.device

    def prepare_streaming(self) -> None:
        """Lay the weights out as `step` and `encode_picture` are fastest with.

        17 frames of 256x160 on 2 cores: 131 ms fp32, 63 ms bf16; contiguous: 134 and 70 ms.
        """
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def empty_memories(self, height: int, width: int) -> dict[str, Tensor]:
        """Return the decoder's memories before the first latent of `height` x `width`.

        They lie in memory as `step` returns them.
        """
        memories = self.decoder.zero_state(1, height, width)
        return {
            f"memory_{at:02}": memory.contiguous(memory_format=torch.channels_last)
            for at, memory in enumerate(memories)
        }

    def step(
        self, latent_1CHW: Tensor, memories: Mapping[str, Tensor], *, last_frame_only: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Decode one normalised latent to 4 raw frames [T, 3, 16H, 16W], or the last of them.

        Returns the frames and the memories after them; those given are left as they are.
        """
        latent_1CHW = self.denormalise(latent_1CHW).to(
            self.decoder.stem.weight.dtype, memory_format=torch.channels_last
        )
        raw_BTCHW, after = self.decoder(
            latent_1CHW.unsqueeze(1),
            [memories[name] for name in sorted(memories)],
            last_frame_only=last_frame_only,
        )
        return raw_BTCHW[0], {f"memory_{at:02}": memory for at, memory in enumerate(after)}

    def encode_picture(self, rgb_1CHW: Tensor) -> Tensor:
        """Return the normalised fp32 latent `[1, C, 1, H, W]` of one picture in 0..1."""
        return self.encode(rgb_1CHW.unsqueeze(1)).transpose(1, 2)

    def normalise(self, latents_BTCHW: Tensor) -> Tensor:
        """Return (z - mean) / std in fp32."""
        return (latents_BTCHW.float() - self.latents_mean) / self.latents_std

    def denormalise(self, latents_BTCHW: Tensor) -> Tensor:
        """Return z * std + mean in fp32."""
        return latents_BTCHW.float() * self.latents_std + self.latents_mean

    def encode_unnormalised(self, frames_BTCHW: Tensor) -> Tensor:
        """Encode frames in 0..1 to bounded fp32 latents.

        T is 1 (one picture, one latent) or a multiple of 17 (5 latents a block, each block alone).
        """
        batch, count, _, height, width = frames_BTCHW.shape
        block = count if count == 1 else BLOCK_FRAMES
        if count % block or height % SPATIAL_RATIO or width % SPATIAL_RATIO:
            raise ValueError(
                f"frames_BTCHW: shape {tuple(frames_BTCHW.shape)}; allowed: T of 1 or a multiple "
                f"of {BLOCK_FRAMES}, H and W multiples of {SPATIAL_RATIO}"
            )
        blocks_BTCHW = frames_BTCHW.reshape(-1, block, *frames_BTCHW.shape[2:])
        blocks_BTCHW = blocks_BTCHW.to(self.encoder.stem.weight.dtype) - 0.5
        blocks_BTCHW = F.pad(blocks_BTCHW, (0, 0, 0, 0, 0, 0, TRIM_FRAMES, 0))
        bound = self.config.latent_bound
        latents_BTCHW = bound * torch.tanh(self.encoder(blocks_BTCHW).float() / bound)
        return latents_BTCHW.reshape(batch, -1, *latents_BTCHW.shape[2:])

    def encode(self, frames_BTCHW: Tensor) -> Tensor:
        """Encode frames in 0..1 to normalised fp32 latents; T as in `encode_unnormalised`."""
        return self.normalise(self.encode_unnormalised(frames_BTCHW))

    def decode_unnormalised(
        self, latents_BTCHW: Tensor, state: Sequence[Tensor] | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Decode whole blocks (T a multiple of 5) to unclamped frames `[B, 17T/5, 3, 16H, 16W]`."""
        batch, count, _, height, width = latents_BTCHW.shape
        if count % BLOCK_LATENTS:
            raise ValueError(
                f"latents_BTCHW: {count} latents; allowed: a multiple of {BLOCK_LATENTS}"
            )
        if state is None:
            state = self.decoder.zero_state(batch, height, width)
        latents_BTCHW = latents_BTCHW.to(self.decoder.stem.weight.dtype)
        raw_BTCHW, after = self.decoder(latents_BTCHW, state)
        blocks = raw_BTCHW.unflatten(1, (-1, RAW_FRAMES * BLOCK_LATENTS))
        return blocks[:, :, TRIM_FRAMES:].flatten(1, 2), after

    def decode(
        self, latents_BTCHW: Tensor, state: Sequence[Tensor] | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Decode normalised latents of whole blocks; see `decode_unnormalised`."""
        return self.decode_unnormalised(self.denormalise(latents_BTCHW), state)


def check_tiny_vae(folder: Path) -> tuple[TinyVaeConfig, WeightFiles]:
    """Return config and files of a folder, the latter checked by their heads.

    Raises:
        ValueError: the config or a tensor's name, shape or dtype does not fit.
        FileNotFoundError: a file is missing.
    """
    config = TinyVaeConfig.from_json((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    files = WeightFiles(folder / WEIGHTS_FILE)
    with torch.device("meta"):
        stored = TinyVae(config).state_dict()
    files.check({name: tuple(each.shape) for name, each in stored.items()})
    return config, files
