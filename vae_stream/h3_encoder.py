"""The encoder of the H3 video autoencoder: a picture, or a clip of 17 frames, to its latents.

Owns the causal convolutions, the tiles in latent space, the rules of the posterior. Weights and
arithmetic are fp32 as released, TF32 off. Invariants: a frame never sees a later one; norms see
each frame alone; in front of every clip, which is encoded alone, lie zero frames.

    conv -> levels of residual blocks, closed by a strided convolution -> norm, SiLU, conv
         -> 1x1x1 -> mean | log variance of each channel

Source: MiniMax-H3 video autoencoder. Shape suffixes: B batch, C channels, T frames or latent
frames, H height, W width.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vae_stream.convolutions import exact_convolutions
from vae_stream.geometry import SPATIAL_RATIO
from vae_stream.pixels import to_imagenet
from vae_stream.tiling import Tiling, plan_tiles
from vae_stream.vit import H3_LATENTS_MEAN, H3_LATENTS_STD
from vae_stream.vit_weights import ENCODER_PARTS, latent_statistics, read_settings
from vae_stream.weight_files import WeightFiles

POSTERIOR_SEED = 42
"""Of the draw for a conditioning picture, whatever the session's seed."""
_BLOCK = re.compile(r"encoder\.down\.(\d+)\.block\.(\d+)\.")
_LOG_VARIANCE_LIMITS = (-30.0, 20.0)
_DIFFUSERS_NAMES = (
    (re.compile(r"\.down_blocks\.(\d+)\.resnets\."), r".down.\1.block."),
    (re.compile(r"\.down_blocks\.(\d+)\.downsamplers\.0\."), r".down.\1.downsample."),
    (re.compile(r"\.conv_shortcut\."), ".nin_shortcut."),
)


class Posterior(StrEnum):
    """What becomes the latent."""

    SAMPLE = "sample"
    """A draw with a fixed seed, rounded to fp16 as the model was conditioned."""
    MODE = "mode"
    """The mean."""


@dataclass(frozen=True, kw_only=True, slots=True)
class H3EncoderConfig:
    """Shape of the network and statistics of its latents; the defaults are the released model."""

    latent_channels: int = 24
    widths: tuple[int, ...] = (128, 256, 256, 512, 512, 1024)
    """Channels of each level."""
    block_count: int = 2
    """Residual blocks of each level."""
    spatial_strides: tuple[int, ...] = (2, 2, 2, 2, 1, 1)
    temporal_strides: tuple[int, ...] = (1, 2, 2, 1, 1, 1)
    norm_groups: int = 32
    norm_eps: float = 1e-6
    latents_mean: tuple[float, ...] = H3_LATENTS_MEAN
    latents_std: tuple[float, ...] = H3_LATENTS_STD


class CausalConv(nn.Conv3d):
    """3x3x3 convolution with zero frames in front; at the edges it mirrors, or only at the end."""

    def __init__(self, width_in: int, width_out: int, stride: tuple[int, int] = (1, 1)) -> None:
        temporal, spatial = stride
        super().__init__(width_in, width_out, 3, stride=(temporal, spatial, spatial))
        self._edges = (0, 1, 0, 1) if spatial > 1 else (1, 1, 1, 1)

    def forward(self, x_BCTHW: Tensor) -> Tensor:
        """Convolve."""
        x_BCTHW = F.pad(x_BCTHW, (*self._edges, 0, 0), mode="reflect")
        return super().forward(F.pad(x_BCTHW, (0, 0, 0, 0, 2, 0)))


class FrameNorm(nn.GroupNorm):
    """Group norm over each frame alone."""

    def forward(self, x_BCTHW: Tensor) -> Tensor:
        """Normalise."""
        frames = super().forward(x_BCTHW.transpose(1, 2).flatten(0, 1).contiguous())
        return frames.unflatten(0, (x_BCTHW.shape[0], -1)).transpose(1, 2).contiguous()


class ResidualBlock(nn.Module):
    """Norm, SiLU and convolution, twice, beside a shortcut."""

    def __init__(self, width_in: int, width_out: int, config: H3EncoderConfig) -> None:
        super().__init__()
        self.norm1 = _norm(width_in, config)
        self.conv1 = CausalConv(width_in, width_out)
        self.norm2 = _norm(width_out, config)
        self.conv2 = CausalConv(width_out, width_out)
        if width_in != width_out:
            self.nin_shortcut = nn.Conv3d(width_in, width_out, 1)

    def forward(self, x_BCTHW: Tensor) -> Tensor:
        """Add what the convolutions make."""
        made = self.conv1(F.silu(self.norm1(x_BCTHW)))
        made = self.conv2(F.silu(self.norm2(made)))
        if hasattr(self, "nin_shortcut"):
            x_BCTHW = self.nin_shortcut(x_BCTHW)
        return x_BCTHW + made


class _Downsample(nn.Module):
    def __init__(self, width: int, stride: tuple[int, int]) -> None:
        super().__init__()
        self.conv = CausalConv(width, width, stride)

    def forward(self, x_BCTHW: Tensor) -> Tensor:
        return self.conv(x_BCTHW)


class _Level(nn.Module):
    def __init__(self, width_in: int, level: int, config: H3EncoderConfig) -> None:
        super().__init__()
        width = config.widths[level]
        self.block = nn.Sequential(
            *(ResidualBlock(width if at else width_in, width, config)
              for at in range(config.block_count))
        )  # fmt: skip
        stride = config.temporal_strides[level], config.spatial_strides[level]
        if stride != (1, 1):
            self.downsample = _Downsample(width, stride)

    def forward(self, x_BCTHW: Tensor) -> Tensor:
        x_BCTHW = self.block(x_BCTHW)
        return self.downsample(x_BCTHW) if hasattr(self, "downsample") else x_BCTHW


class _Trunk(nn.Module):
    """What the release calls the encoder."""

    def __init__(self, config: H3EncoderConfig) -> None:
        super().__init__()
        widths_in = (config.widths[0], *config.widths)
        self.conv_in = CausalConv(3, config.widths[0])
        self.down = nn.Sequential(
            *(_Level(widths_in[level], level, config) for level in range(len(config.widths)))
        )
        self.norm_out = _norm(config.widths[-1], config)
        self.conv_out = CausalConv(config.widths[-1], 2 * config.latent_channels)

    def forward(self, x_BCTHW: Tensor) -> Tensor:
        return self.conv_out(F.silu(self.norm_out(self.down(self.conv_in(x_BCTHW)))))


class H3Encoder(nn.Module):
    """Encoder with the statistics of its latents.

    Args:
        config: sizes.
        tiling: part of what the latents are; the default is the released one.
        posterior: what becomes the latent.
    """

    latents_mean: Tensor
    latents_std: Tensor

    def __init__(
        self,
        config: H3EncoderConfig,
        *,
        tiling: Tiling | None = None,
        posterior: Posterior = Posterior.SAMPLE,
    ) -> None:
        super().__init__()
        self.config = config
        self._tiling = tiling or Tiling()
        self._posterior = posterior
        self.encoder = _Trunk(config)
        self.quant_conv = nn.Conv3d(2 * config.latent_channels, 2 * config.latent_channels, 1)
        self.reset_statistics()

    def reset_statistics(self) -> None:
        """Set the statistics of latents from the config, on the device of the parameters."""
        for name in ("latents_mean", "latents_std"):
            values = torch.tensor(
                getattr(self.config, name), dtype=torch.float32, device=self.device
            )
            self.register_buffer(name, values[:, None, None, None], persistent=False)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.quant_conv.weight.device

    def prepare_streaming(self) -> None:
        """Weights lie as they do in the files: a picture is encoded once."""

    def moments(self, frames_BCTHW: Tensor) -> Tensor:
        """Return mean and log variance `[B, 2C, t, H/16, W/16]` of one picture or clip.

        Args:
            frames_BCTHW: ImageNet-normalised; 1 frame, or a clip of 17 that gives 5 latents.
        """
        height_px, width_px = frames_BCTHW.shape[3:]
        plan = plan_tiles(height_px, width_px, self._tiling)
        with exact_convolutions():
            tiles = [self.quant_conv(self.encoder(tile)) for tile in plan.cut(frames_BCTHW)]
        return plan.scaled(SPATIAL_RATIO).join(tiles)

    def encode_picture(self, rgb_1CHW: Tensor) -> Tensor:
        """Return the normalised fp32 latent `[1, C, 1, H, W]` of one picture in 0..1."""
        frames_1CTHW = to_imagenet(rgb_1CHW).unsqueeze(2)
        mean, log_variance = self.moments(frames_1CTHW).chunk(2, dim=1)
        if self._posterior == Posterior.SAMPLE:
            # Drawn on the CPU, so that every device draws the same.
            generator = torch.Generator().manual_seed(POSTERIOR_SEED)
            noise = torch.randn(mean.shape, generator=generator).to(mean.device)
            deviation = torch.exp(0.5 * log_variance.clamp(*_LOG_VARIANCE_LIMITS))
            mean = (mean + deviation * noise).to(torch.float16).float()
        return (mean - self.latents_mean) / self.latents_std


def is_h3_encoder(names: Container[str]) -> bool:
    """Tell whether the H3 encoder is among tensors, in either layout."""
    return "encoder.conv_in.weight" in names and "quant_conv.weight" in names


@torch.no_grad()
def load_h3_encoder(
    files: WeightFiles,
    *,
    device: torch.device | str,
    tiling: Tiling | None = None,
    posterior: Posterior = Posterior.SAMPLE,
) -> H3Encoder:
    """Read the encoder from the weights of the whole autoencoder, or of itself alone.

    Raises:
        ValueError: as `check_h3_encoder`, before there is memory for any weight; or a file is
            damaged.
    """
    config, stored = check_h3_encoder(files)
    with torch.device("meta"):
        network = H3Encoder(config, tiling=tiling, posterior=posterior)
    network = network.to_empty(device=device)
    network.reset_statistics()
    for name, parameter in network.named_parameters():
        parameter.copy_(files.read(stored[name]))
    return network.eval().requires_grad_(False)


def check_h3_encoder(files: WeightFiles) -> tuple[H3EncoderConfig, dict[str, str]]:
    """Return the sizes of the encoder in `files`, and stored names by ours; heads alone are read.

    Raises:
        ValueError: a tensor is missing, left over, of another shape or dtype.
    """
    stored = {_our_name(name): name for name in files.shapes if name.startswith(ENCODER_PARTS)}
    config = _config(files, stored)
    with torch.device("meta"):
        parameters = dict(H3Encoder(config).named_parameters())
    files.check(
        {stored.get(name, name): tuple(each.shape) for name, each in parameters.items()},
        ignored=[name for name in files.shapes if not name.startswith(ENCODER_PARTS)],
    )
    return config, stored


def _config(files: WeightFiles, stored: Mapping[str, str]) -> H3EncoderConfig:
    """Sizes by the shapes of tensors, what shapes cannot tell by the config beside them."""
    settings = read_settings(files.source)
    released = H3EncoderConfig()
    found = [_BLOCK.match(name) for name in stored]
    places = {(int(match[1]), int(match[2])) for match in found if match}
    levels = 1 + max((level for level, _ in places), default=-1)
    first = [f"encoder.down.{level}.block.0.conv1.weight" for level in range(levels)]
    missing = [name for name in (*first, "quant_conv.weight") if name not in stored]
    if missing or not levels:
        raise ValueError(f"{files.source}: lacks {(missing or ['encoder.down.0.block.0'])[0]}")
    strides = tuple(
        2 if f"encoder.down.{level}.downsample.conv.weight" in stored else 1
        for level in range(levels)
    )
    temporal = tuple(settings.get("temporal_downsample_factors", released.temporal_strides))
    if strides.count(2) != 4 or len(temporal) != levels:
        raise ValueError(
            f"{files.source}: encoder with spatial strides {strides} and temporal strides "
            f"{temporal}; expected levels that halve the size four times, and as many of both"
        )
    channels = files.shapes[stored["quant_conv.weight"]][0] // 2
    return H3EncoderConfig(
        latent_channels=channels,
        widths=tuple(files.shapes[stored[name]][0] for name in first),
        block_count=1 + max(block for _, block in places),
        spatial_strides=strides,
        temporal_strides=temporal,
        norm_groups=int(settings.get("norm_num_groups", released.norm_groups)),
        norm_eps=float(settings.get("norm_eps", released.norm_eps)),
        **latent_statistics(files.source, settings, channels),
    )


def _norm(width: int, config: H3EncoderConfig) -> FrameNorm:
    return FrameNorm(config.norm_groups, width, eps=config.norm_eps)


def _our_name(stored: str) -> str:
    for pattern, replacement in _DIFFUSERS_NAMES:
        stored = pattern.sub(replacement, stored)
    return stored
