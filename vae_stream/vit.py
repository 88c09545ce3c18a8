"""The vision transformer that decodes H3 latents: config, parameters, what a block computes.

Owns the parameter names (those of the released causal decoder) and the arithmetic that every
decoder with these weights shares; `forward` is the original, which sees a whole window of latents
at once. Invariants: norms, rotary tables, residual stream, embedder and head are fp32; only the
products and the attention of the blocks have another dtype. Without attention masks.

    latent voxel -> token; 4 register tokens and a zero token follow all tokens, at position 0
    block   x += attention(rms(x)) * scale1 ; x += w2(silu(gate) * value) * scale2
    token -> 3 colours x 4 frames x 16 x 16 pixels, ImageNet-normalised

Source: MiniMax-H3 video autoencoder. Shape suffixes: B batch, C channels, T latent frames or
frames, H height, W width, R rows (tokens), D model width, N heads, K head width, A rotary channels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vae_stream.convolutions import exact_convolutions
from vae_stream.geometry import RAW_FRAMES, SPATIAL_RATIO

_COLOURS = 3

H3_LATENTS_MEAN = (
    0.858090341091156, -0.9606591463088989, 1.0661640167236328, -0.5090325474739075,
    -0.2727581858634949, -1.3675414323806763, -0.2553254961967468, -0.26907554268836975,
    -0.5376840829849243, -0.0464097298681736, 0.6657370328903198, 0.19690127670764923,
    -0.5460608005523682, -0.4035342037677765, -0.23683024942874908, 0.25928452610969543,
    -0.30133944749832153, 0.211341992020607, -1.1206848621368408, 0.3581933379173279,
    -0.04225143790245056, 0.2604829967021942, 0.22864092886447906, 0.7056031823158264,
)  # fmt: skip
"""Mean of each channel of H3 latents, as released."""
H3_LATENTS_STD = (
    1.2223774194717407, 1.2767263650894165, 1.68317747116088865, 1.7549455165863037,
    1.5636216402053833, 2.194143533706665, 0.96531379222869875, 1.05698859691619875,
    0.841948926448822, 0.7729952931404114, 1.8955937623977661, 0.946841835975647,
    0.7996809482574463, 0.44988900423049925, 0.7197399735450745, 0.69362932443618775,
    2.961095094680786, 2.7694199085235595, 3.0496184825897215, 2.1088054180145264,
    3.276226282119751, 3.1627357006073, 2.28168129920959475, 2.6127843856811525,
)  # fmt: skip
"""Standard deviation of each channel of H3 latents, as released."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VitConfig:
    """Shape of the network and statistics of its latents; the defaults are the released model."""

    latent_channels: int = 24
    layer_count: int = 36
    head_count: int = 32
    head_width: int = 64
    ffn_width: int = 8192
    register_count: int = 4
    rotary_width: int = 48
    """Leading channels of a head that are rotated; the rest passes."""
    theta: float = 100.0
    eps: float = 1e-5
    latents_mean: tuple[float, ...] = H3_LATENTS_MEAN
    latents_std: tuple[float, ...] = H3_LATENTS_STD

    def __post_init__(self) -> None:
        for name in ("latents_mean", "latents_std"):
            if len(getattr(self, name)) != self.latent_channels:
                raise ValueError(
                    f"{name}: {len(getattr(self, name))} values; allowed: {self.latent_channels}"
                )

    @property
    def width(self) -> int:
        """Width of a token."""
        return self.head_count * self.head_width

    @property
    def suffix_count(self) -> int:
        """Rows after those of the latents: register tokens and a zero token."""
        return self.register_count + 1

    @property
    def patch_width(self) -> int:
        """Values that a token becomes."""
        return _COLOURS * RAW_FRAMES * SPATIAL_RATIO**2


class Attention(nn.Module):
    """Projections of a block's attention; each head's q, k and v lie side by side."""

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        self.to_qkv = nn.Linear(config.width, 3 * config.width)
        self.to_out = nn.Linear(config.width, config.width)


class FeedForward(nn.Module):
    """Gated SiLU; `w1` makes [gate | value]."""

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.width, 2 * config.ffn_width)
        self.w2 = nn.Linear(config.ffn_width, config.width)

    def forward(self, x_BRD: Tensor) -> Tensor:
        """Return the block's second addend, before its scale."""
        gate, value = self.w1(x_BRD).chunk(2, dim=-1)
        return self.w2(value * F.silu(gate))


class Block(nn.Module):
    """Parameters of a block, and what surrounds its attention."""

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        self._head_count, self._eps = config.head_count, config.eps
        self.norm1 = nn.RMSNorm(config.width, eps=config.eps)
        self.attn = Attention(config)
        self.scale1 = nn.Parameter(torch.zeros(config.width))
        self.norm2 = nn.RMSNorm(config.width, eps=config.eps)
        self.ff = FeedForward(config)
        self.scale2 = nn.Parameter(torch.zeros(config.width))

    def qkv(self, x_BRD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys of unit RMS in fp32, values in the blocks' dtype; each [B, R, N, K]."""
        dtype = self.attn.to_qkv.weight.dtype
        rows = self.attn.to_qkv(self.norm1(x_BRD).to(dtype))
        q_BRNK, k_BRNK, v_BRNK = rows.unflatten(-1, (self._head_count, 3, -1)).unbind(-2)
        width = (q_BRNK.shape[-1],)
        q_BRNK = F.rms_norm(q_BRNK.float(), width, eps=self._eps)
        k_BRNK = F.rms_norm(k_BRNK.float(), width, eps=self._eps)
        return q_BRNK, k_BRNK, v_BRNK

    def forward(self, x_BRD: Tensor, cos_R1A: Tensor, sin_R1A: Tensor) -> Tensor:
        """Run the block with every row seeing every other."""
        q_BRNK, k_BRNK, v_BRNK = self.qkv(x_BRD)
        q_BRNK, k_BRNK = (
            rotate(each, cos_R1A, sin_R1A).to(v_BRNK.dtype) for each in (q_BRNK, k_BRNK)
        )
        attended_BNRK = F.scaled_dot_product_attention(
            q_BRNK.transpose(1, 2), k_BRNK.transpose(1, 2), v_BRNK.transpose(1, 2)
        )
        return self.finish(x_BRD, attended_BNRK.transpose(1, 2).flatten(2))

    def finish(self, x_BRD: Tensor, attention_BRD: Tensor) -> Tensor:
        """Add what attention and feed-forward made to the fp32 rows."""
        x_BRD = x_BRD + self.attn.to_out(attention_BRD) * self.scale1
        dtype = self.ff.w1.weight.dtype
        return x_BRD + self.ff(self.norm2(x_BRD).to(dtype)) * self.scale2


class Vit(nn.Module):
    """All parameters of a decoder, and the original decoding of one window."""

    latents_mean: Tensor
    latents_std: Tensor

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        self.config = config
        channels = config.latent_channels
        self.post_quant_conv = nn.Conv3d(channels, channels, 1)
        self.x_embedder = nn.Linear(channels, config.width)
        self.register_tokens = nn.Parameter(torch.zeros(1, config.register_count, config.width))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layer_count))
        self.norm_out = nn.LayerNorm(config.width, eps=config.eps)
        self.proj_out = nn.Linear(config.width, config.patch_width)
        self.reset_statistics()

    def reset_statistics(self) -> None:
        """Set the statistics of latents from the config, on the device of the parameters."""
        device = self.register_tokens.device
        for name in ("latents_mean", "latents_std"):
            values = torch.tensor(getattr(self.config, name), dtype=torch.float32, device=device)
            self.register_buffer(name, values[:, None, None, None], persistent=False)

    def cast_blocks(self, dtype: torch.dtype) -> Vit:
        """Set the dtype of the blocks' products; everything else stays fp32."""
        for block in self.blocks:
            for part in (block.attn, block.ff):
                part.to(dtype)
        return self

    def embed(self, latents_BCTHW: Tensor) -> Tensor:
        """Return a token for each voxel of normalised latents, in the order t, y, x."""
        z_BCTHW = latents_BCTHW.float() * self.latents_std + self.latents_mean
        z_BCTHW = self.post_quant_conv(z_BCTHW)
        return self.x_embedder(z_BCTHW.flatten(2).transpose(1, 2))

    def suffix(self, batch: int) -> Tensor:
        """Return the rows that follow the tokens."""
        return F.pad(self.register_tokens, (0, 0, 0, 1)).expand(batch, -1, -1)

    def head(self, x_BRD: Tensor, latents: int, height: int, width: int) -> Tensor:
        """Return frames `[B, 3, 4T, 16H, 16W]`, ImageNet-normalised, of the tokens of T latents."""
        patches = self.proj_out(self.norm_out(x_BRD))
        size = (latents, height, width, _COLOURS, RAW_FRAMES, SPATIAL_RATIO, SPATIAL_RATIO)
        frames = patches.unflatten(1, size[:3]).unflatten(-1, size[3:])
        frames = frames.permute(0, 4, 1, 5, 2, 6, 3, 7)
        return frames.flatten(6, 7).flatten(4, 5).flatten(2, 3)

    def begin(self, latents_BCTHW: Tensor) -> Tensor:
        """Return the rows of a window: its tokens and the suffix."""
        tokens_BRD = self.embed(latents_BCTHW)
        return torch.cat([tokens_BRD, self.suffix(tokens_BRD.shape[0])], dim=1)

    def forward(self, latents_BCTHW: Tensor) -> Tensor:
        """Decode a window of normalised latents of some tiles, every token seeing every other.

        Raises:
            ValueError: a window of one latent.
        """
        check_window(latents_BCTHW)
        latents, height, width = latents_BCTHW.shape[2:]
        with exact_convolutions():
            x_BRD = self.begin(latents_BCTHW)
        cos_R1A, sin_R1A = window_rotary(self.config, latents, height, width, x_BRD.device)
        for block in self.blocks:
            x_BRD = block(x_BRD, cos_R1A, sin_R1A)
        return self.head(x_BRD[:, : latents * height * width], latents, height, width)


def check_window(latents_BCTHW: Tensor) -> None:
    """Refuse a window of one latent, which the network never saw and decodes badly.

    Raises: ValueError.
    """
    if latents_BCTHW.shape[2] < 2:
        raise ValueError(
            f"latents_BCTHW: {latents_BCTHW.shape[2]} latents in the window; allowed: 2 or more "
            "(repeat the last one)"
        )


def rotate(x_BRNK: Tensor, cos_R1A: Tensor, sin_R1A: Tensor) -> Tensor:
    """Rotate channel pairs (a, a + A) of the leading 2A channels; the rest passes."""
    half = cos_R1A.shape[-1]
    first, second, rest = x_BRNK.split([half, half, x_BRNK.shape[-1] - 2 * half], dim=-1)
    return torch.cat(
        [first * cos_R1A - second * sin_R1A, second * cos_R1A + first * sin_R1A, rest], dim=-1
    )


def window_rotary(
    config: VitConfig, latents: int, height: int, width: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [R, 1, A] of a window: each axis has positions -1 to 1 over its own length.

    The suffix lies at position 0 of every axis.
    """
    axes = [
        2.0 * (torch.arange(0.5, size, dtype=torch.float32, device=device) / size) - 1.0
        for size in (latents, height, width)
    ]
    positions_R3 = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, 2)
    positions_R3 = F.pad(positions_R3, (0, 0, 0, config.suffix_count))
    steps = torch.arange(0, 1, 6 / config.rotary_width, dtype=torch.float32, device=device)
    frequencies = 1.0 / config.theta**steps
    angles_R1A = (2.0 * math.pi * positions_R3[:, :, None] * frequencies).flatten(1)[:, None]
    return angles_R1A.cos(), angles_R1A.sin()
