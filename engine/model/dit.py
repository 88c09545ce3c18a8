"""The MiniMax-H3 diffusion transformer, read top to bottom.

Owns the weights and the maths between rows in and velocities out. It knows nothing of windows,
caches or sampling: attention is one call to ``attend``, which the caller supplies and which
applies RoPE, the camera encoding and the visibility of rows.

Parameter names are those of diffusers' ``MiniMaxH3Transformer3DModel``.

Shape suffixes: B batch, R rows, D width, N heads, K head width, M distinct times, C time width,
E text width.

| fp32 always | dtype of the blocks (bf16 as released) |
|---|---|
| latents, velocities, input projections, ``time_embedder``, heads | linears, modulation |
| inside every RMSNorm, weight included; rounded once on leaving | residuals, q, k, v |

Source: h3 release configuration; equations in the comments below.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.config import ModelConfig

TAG_VIDEO, TAG_TEXT, TAG_AUDIO = 0, 1, 2
"""AdaLN modality tags; also the order of the thirds of each AdaLN projection."""

FP32_MODULES = ("proj_in", "audio_proj_in", "time_embedder", "proj_out", "audio_proj_out")
"""Modules that stay in fp32 whatever the dtype of the blocks is."""


class Attend(Protocol):
    """What a block asks of its caller: visibility, positions, cameras, cache, attention."""

    def __call__(self, layer: int, q_BRNK: Any, k_BRNK: Any, v_BRNK: Any) -> Any:
        """Return the attention output [B, R, N, K] after the query row's camera matrix.

        ``q_BRNK`` and ``k_BRNK`` come after QK-RMSNorm and before RoPE and PRoPE, ``v_BRNK``
        as projected: exactly what the cache keeps. Other halves than the model's own may agree on
        other forms with the attend that they are used with.
        """
        ...

    def store(self, layer: int, q_BRNK: Any, k_BRNK: Any, v_BRNK: Any) -> None:
        """Take the keys and values of the last block of a refresh, which needs no output."""
        ...


class Halves(Protocol):
    """The two halves of each block, before and after attention."""

    def project(self, layer: int, x: Any, modulation_BR6D: Tensor) -> tuple[Tensor, Any, Any, Any]:
        """Take embedded rows or what `finish` returned; return the rows and what ``attend`` takes.

        So a form may leave the last sum of a block to the first pass over the rows of the next.
        """
        ...

    def finish(self, layer: int, x_BRD: Tensor, o: Any, modulation_BR6D: Tensor) -> Any:
        """Take the rows of the block and what ``attend`` returned."""
        ...

    def settle(self, x: Any) -> Tensor:
        """Return the rows [B, R, D] that the last `finish` stands for."""
        ...


class RMSNorm(nn.Module):
    """x / rms(x) * weight in fp32, rounded once to the dtype of x."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis."""
        normed = F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.eps)
        return normed.to(x.dtype)


class Attention(nn.Module):
    """Projections of one attention; the product itself is the caller's ``attend``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        inner = config.num_attention_heads * config.attention_head_dim
        self.heads = config.num_attention_heads
        self.to_q = nn.Linear(config.hidden_size, inner, bias=False)
        self.to_k = nn.Linear(config.hidden_size, inner, bias=False)
        self.to_v = nn.Linear(config.hidden_size, inner, bias=False)
        self.norm_q = RMSNorm(config.attention_head_dim, config.qk_norm_eps)
        self.norm_k = RMSNorm(config.attention_head_dim, config.qk_norm_eps)
        self.to_out = nn.ModuleList([nn.Linear(inner, config.hidden_size, bias=False)])

    def project(self, h_BRD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k (normalised per head) and v, each [B, R, N, K]."""
        q_BRNK, k_BRNK, v_BRNK = (
            linear(h_BRD).unflatten(-1, (self.heads, -1))
            for linear in (self.to_q, self.to_k, self.to_v)
        )
        return self.norm_q(q_BRNK), self.norm_k(k_BRNK), v_BRNK

    def merge(self, o_BRNK: Tensor) -> Tensor:
        """Concatenate the heads and project back to the residual width."""
        return self.to_out[0](o_BRNK.flatten(-2))


class GatedLinear(nn.Module):
    """The up-projection of the feed-forward part: rows [value ; gate]."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 2 * inner, bias=False)

    def forward(self, h_BRD: Tensor) -> Tensor:
        """Return value * silu(gate)."""
        value, gate = self.proj(h_BRD).chunk(2, dim=-1)
        return value * F.silu(gate)


class FeedForward(nn.Module):
    """SwiGLU; the middle entry keeps the released parameter indices."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.net = nn.ModuleList(
            [
                GatedLinear(config.hidden_size, config.ffn_dim),
                nn.Identity(),
                nn.Linear(config.ffn_dim, config.hidden_size, bias=False),
            ]
        )

    def forward(self, h_BRD: Tensor) -> Tensor:
        """Apply up-projection, gate and down-projection."""
        return self.net[2](self.net[0](h_BRD))


class AdaLN(nn.Module):
    """Linear from the time embedding to modulation vectors."""

    def __init__(self, config: ModelConfig, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(config.time_embed_dim, outputs)

    def forward(self, temb_MC: Tensor, parts: int) -> Tensor:
        """Return [..., tags, parts, D] for silu(temb) [..., C]."""
        width = self.linear.out_features
        tags = 3 if parts == 6 else 1
        return self.linear(temb_MC.to(self.linear.weight.dtype)).unflatten(
            -1, (tags, parts, width // (tags * parts))
        )


class RefinerBlock(nn.Module):
    """Text refiner: plain pre-norm block over text rows, no modulation, no rotary."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm1 = RMSNorm(config.hidden_size, config.norm_eps)
        self.attn = Attention(config)
        self.norm2 = RMSNorm(config.hidden_size, config.norm_eps)
        self.ff = FeedForward(config)

    def forward(self, x_BRD: Tensor) -> Tensor:
        """Add Attn(norm1 x), then FFN(norm2 x)."""
        q, k, v = (a.transpose(1, 2) for a in self.attn.project(self.norm1(x_BRD)))
        x_BRD = x_BRD + self.attn.merge(F.scaled_dot_product_attention(q, k, v).transpose(1, 2))
        return x_BRD + self.ff(self.norm2(x_BRD))


class TokenRefiner(nn.Module):
    """The refiner blocks and their closing norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.refiner_blocks = nn.ModuleList(
            [RefinerBlock(config) for _ in range(config.num_refiner_layers)]
        )
        self.final_norm = RMSNorm(config.hidden_size, config.final_norm_eps)


class TransformerBlock(nn.Module):
    """One main block.

    h = norm1(x) (1 + scale_a) + shift_a;  x = x + gate_a Attn(h)
    h = norm2(x) (1 + scale_f) + shift_f;  x = x + gate_f FFN(h)

    ``project`` and ``finish`` are the halves before and after attention, so that a compiler can
    take each without seeing the cache.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm1 = RMSNorm(config.hidden_size, config.norm_eps)
        self.attn = Attention(config)
        self.norm2 = RMSNorm(config.hidden_size, config.norm_eps)
        self.ff = FeedForward(config)
        self.adaln_proj = AdaLN(config, 18 * config.hidden_size)

    def project(self, x_BRD: Tensor, modulation_BR6D: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k, v [B, R, N, K]; ``modulation_BR6D`` may have one row for all."""
        shift_a, scale_a = modulation_BR6D[..., 0, :], modulation_BR6D[..., 1, :]
        return self.attn.project(self.norm1(x_BRD) * (1 + scale_a) + shift_a)

    def finish(self, x_BRD: Tensor, o_BRNK: Tensor, modulation_BR6D: Tensor) -> Tensor:
        """Add the attention branch, then the feed-forward branch."""
        gate_a, shift_f, scale_f, gate_f = modulation_BR6D[..., 2:, :].unbind(-2)
        x_BRD = x_BRD + gate_a * self.attn.merge(o_BRNK)
        return x_BRD + gate_f * self.ff(self.norm2(x_BRD) * (1 + scale_f) + shift_f)


class TimeEmbedder(nn.Module):
    """Sinusoid of t in [0, 1] (unscaled, cosines first) and a two-layer MLP, in fp32."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self._freq_half = config.freq_dim // 2
        self.linear_1 = nn.Linear(config.freq_dim, config.time_embed_hidden_dim)
        self.linear_2 = nn.Linear(config.time_embed_hidden_dim, config.time_embed_dim)

    def forward(self, t_M: Tensor) -> Tensor:
        """Return silu(L2 silu(L1 e(t))), fp32 [..., C]."""
        index = torch.arange(self._freq_half, dtype=torch.float32, device=t_M.device)
        angle = t_M.float()[..., None] * torch.exp(-math.log(10_000) * index / self._freq_half)
        embedding = torch.cat([angle.cos(), angle.sin()], dim=-1)
        return F.silu(self.linear_2(F.silu(self.linear_1(embedding))))


class OutputNorm(nn.Module):
    """Final norm and its modulation (shift first, scale second; no modality tag)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.final_norm_eps)
        self.linear = nn.Linear(config.time_embed_dim, 2 * config.hidden_size)


class MiniMaxH3Transformer(nn.Module):
    """Rows in, velocities out. Velocity points to the data: x0 = x + (1 - t) v."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        features = config.in_channels * math.prod(config.patch_size)
        self.proj_in = nn.Linear(features, config.hidden_size)
        self.audio_proj_in = nn.Linear(config.audio_in_channels, config.hidden_size)
        self.context_embedder = nn.Linear(config.text_dim, config.hidden_size)
        self.token_refiner = TokenRefiner(config)
        self.time_embedder = TimeEmbedder(config)
        self.transformer_blocks = nn.ModuleList(
            [TransformerBlock(config) for _ in range(config.num_layers)]
        )
        self.norm_out = OutputNorm(config)
        self.proj_out = nn.Linear(config.hidden_size, features)
        self.audio_proj_out = nn.Linear(config.hidden_size, config.audio_in_channels)

    def block(self, layer: int) -> TransformerBlock:
        """Main block by index."""
        return cast(TransformerBlock, self.transformer_blocks[layer])

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the blocks and of the rows between them."""
        return self.context_embedder.weight.dtype

    def cast_blocks(self, dtype: torch.dtype) -> None:
        """Convert everything but the fp32 islands to ``dtype``."""
        for name, module in self.named_children():
            module.to(torch.float32 if name in FP32_MODULES else dtype)

    def refine_text(self, text_BRE: Tensor) -> Tensor:
        """Project and refine text rows: [B, T, E] -> [B, T, D]; depends on the prompt alone."""
        x_BRD = self.context_embedder(text_BRE.to(self.dtype))
        for block in self.token_refiner.refiner_blocks:
            x_BRD = block(x_BRD)
        return self.token_refiner.final_norm(x_BRD)

    def embed_video(self, rows_BRC: Tensor) -> Tensor:
        """Project video rows (fp32, channel-major patches) to the residual width."""
        return self.proj_in(rows_BRC.float()).to(self.dtype)

    def embed_audio(self, rows_BRC: Tensor) -> Tensor:
        """Project audio rows to the residual width."""
        return self.audio_proj_in(rows_BRC.float()).to(self.dtype)

    def time_embedding(self, t_M: Tensor) -> Tensor:
        """Return silu(temb), fp32 [..., C], for model times t = 1 - sigma."""
        return self.time_embedder(t_M)

    def modulation(self, layer: int, temb_MC: Tensor) -> Tensor:
        """Return the block's vectors [..., 3 tags, 6, D] for silu(temb).

        Order: shift, scale, gate of attention, then of the feed-forward part.
        """
        vectors: Tensor = self.block(layer).adaln_proj(temb_MC, 6)
        return vectors.to(self.dtype)

    def final_modulation(self, temb_MC: Tensor) -> Tensor:
        """Return the vectors of the output norm [..., 2, D]: shift, scale."""
        linear = self.norm_out.linear
        return linear(temb_MC.to(linear.weight.dtype)).unflatten(-1, (2, -1)).to(self.dtype)

    def run_blocks(
        self,
        x_BRD: Tensor,
        modulations_BR6D: Sequence[Tensor],
        attend: Attend,
        halves: Halves,
        *,
        keys_values_only: bool = False,
    ) -> Tensor:
        """Run all main blocks.

        Args:
            x_BRD: embedded rows.
            modulations_BR6D: one tensor a block, [B or 1, R or 1, 6, D].
            attend: see ``Attend``.
            halves: how the blocks compute; `block_ops.PlainBlockOps` is the code of the blocks.
            keys_values_only: stop in the last block once its keys and values are stored; the
                rows returned are then those that entered it. Exact for a refresh, whose output
                nobody reads.
        """
        last = len(self.transformer_blocks) - 1
        x: Any = x_BRD
        for layer in range(last + 1):
            x_BRD, q_BRNK, k_BRNK, v_BRNK = halves.project(layer, x, modulations_BR6D[layer])
            if keys_values_only and layer == last:
                attend.store(layer, q_BRNK, k_BRNK, v_BRNK)
                return x_BRD
            o = attend(layer, q_BRNK, k_BRNK, v_BRNK)
            x = halves.finish(layer, x_BRD, o, modulations_BR6D[layer])
        return halves.settle(x)

    def _normed(self, x_BRD: Tensor, modulation_BR2D: Tensor) -> Tensor:
        shift, scale = modulation_BR2D.unbind(-2)
        return (self.norm_out.norm(x_BRD) * (1 + scale) + shift).float()

    def head_video(self, x_BRD: Tensor, modulation_BR2D: Tensor) -> Tensor:
        """Return the fp32 velocity rows [B, R, 96]."""
        return self.proj_out(self._normed(x_BRD, modulation_BR2D))

    def head_audio(self, x_BRD: Tensor, modulation_BR2D: Tensor) -> Tensor:
        """Return the fp32 audio velocity rows [B, R, 32]."""
        return self.audio_proj_out(self._normed(x_BRD, modulation_BR2D))
