"""The blocks by fused kernels: `BlockOps` whose work between the products is one pass each.

    x --norm, modulation--> q k v --norm, RoPE, PRoPE, into the cache--> attention --PRoPE-->
    output product --gate, sum, norm, modulation--> up --SwiGLU--> down --gate, sum, and norm and
    modulation of the next block--> q k v of the next block

Owns `fused_block_ops`. Queries, keys and values are one product, whose weights lie in one piece;
between `project` and `place` they are as projected, not normalised. Where a linear is in eight bits
the kernel before it ends with the quantisation of its rows. Where one has an adapter beside it, its
products are the same whether the kernel behind it forms the sum or it is formed before. The plain
code of the blocks still runs on the same weights and is the oracle.
Shape suffixes: B batch, R rows, D width, N heads, K head width, M runs of rows with one modulation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.attention.placement import Placement
from engine.block_ops import BlockOps, Fp8Rows, Gated, Projected, Residual, Rows, Slot, Sum
from engine.cache_buffers import CacheBuffers, WindowViews
from engine.errors import UnsupportedError
from engine.kernels import adaln, fp8_linear, qknorm_rope, slide, sparse, swiglu
from engine.kernels.reference import Rounding
from engine.model.dit import MiniMaxH3Transformer, RMSNorm
from engine.model.lora_linear import LoraLinear
from engine.quant import Fp8Linear, block_linears


@dataclass(kw_only=True, eq=False, slots=True)
class _Product:
    """Weights [N, K] of one product; with ``scale`` in eight bits."""

    weight_NK: Tensor
    scale: Tensor | None
    adapted: tuple[nn.Module, ...] = ()
    """The linears side by side, if any of them has a low-rank branch."""

    @property
    def in_blocks(self) -> bool:
        """Whether rows in eight bits have a factor for each block of their channels."""
        return self.scale is not None and self.scale.ndim == 2

    @property
    def sums_inside(self) -> bool:
        """Whether the kernel behind the product adds what the branches make."""
        return any(isinstance(each, LoraLinear) and each.sums_inside for each in self.adapted)

    def deltas(self, rows: Rows) -> list[Tensor]:
        """What is added to the outputs of each linear; empty without an adapter."""
        if not self.adapted:
            return []
        assert isinstance(rows, Tensor)
        return [
            linear.branch(rows)
            if isinstance(linear, LoraLinear)
            else rows.new_zeros(*rows.shape[:-1], linear.get_parameter("weight").shape[0])
            for linear in self.adapted
        ]

    def summed(self, rows: Rows, dtype: torch.dtype) -> Tensor:
        """Return the outputs with what is added to them."""
        deltas, base = self.deltas(rows), self(rows, dtype)
        if not deltas:
            return base
        return base + (deltas[0] if len(deltas) == 1 else torch.cat(deltas, dim=-1))

    def __call__(self, rows: Rows, dtype: torch.dtype) -> Tensor:
        """Return the outputs of the weights alone."""
        if self.scale is None:
            assert isinstance(rows, Tensor)
            return F.linear(rows, self.weight_NK)
        if isinstance(rows, Tensor):
            rows = Fp8Rows(*fp8_linear.quantize_rows(rows, self.in_blocks))
        return fp8_linear.fp8_linear(rows.codes, rows.scale, self.weight_NK, self.scale, dtype)


@dataclass(kw_only=True, eq=False, slots=True)
class _Block:
    """Weights of one block."""

    norm1: RMSNorm
    norm2: RMSNorm
    norm_q: RMSNorm
    norm_k: RMSNorm
    qkv: _Product
    out: _Product
    up: _Product
    down: _Product


def fused_block_ops(model: MiniMaxH3Transformer, rounding: Rounding) -> BlockOps:
    """Return the fused form of a model's blocks.

    The weights of queries, keys and values move into one piece, of which the plain linears keep
    views; nothing is copied twice. What `quant.quantize_` did to the model is kept to.

    Args:
        model: on CUDA; its linears are not replaced afterwards.
        rounding: "eager" rounds where the plain code does, "fast" once at each store.

    Raises: UnsupportedError for linears that are neither plain nor in eight bits.
    """
    return _FusedBlockOps(model, rounding)


class _FusedBlockOps:
    def __init__(self, model: MiniMaxH3Transformer, rounding: Rounding) -> None:
        config = model.config
        self._rounding: Rounding = rounding
        self._heads, self._width = config.num_attention_heads, config.attention_head_dim
        self._blocks: list[_Block] = []
        for layer in range(config.num_layers):
            block = model.block(layer)
            products = {
                str(name): _product([getattr(owner, attribute) for owner, attribute in places])
                for name, places in block_linears(block).items()
            }
            attention = block.attn
            self._blocks.append(
                _Block(
                    norm1=block.norm1,
                    norm2=block.norm2,
                    norm_q=attention.norm_q,
                    norm_k=attention.norm_k,
                    **products,
                )
            )

    def project(
        self, layer: int, x: Residual, modulation_BM6D: Tensor
    ) -> tuple[Tensor, Projected, Projected, Projected]:
        """Return x, and q, k, v as projected, views of one product."""
        block = self._blocks[layer]
        x_BRD, rows = self._enter(block, x, modulation_BM6D)
        base_BRF, delta = self._terms(block.qkv, rows, x_BRD.dtype)
        parts = base_BRF.unflatten(-1, (3, self._heads, self._width)).unbind(2)
        if delta is None:
            return x_BRD, parts[0], parts[1], parts[2]
        deltas = (each.unflatten(-1, (self._heads, self._width)) for each in delta)
        q, k, v = (Sum(*pair) for pair in zip(parts, deltas, strict=True))
        return x_BRD, q, k, v

    def _enter(self, block: _Block, x: Residual, modulation_BM6D: Tensor) -> tuple[Tensor, Rows]:
        """Rows of a block, and the same normalised and modulated for its first product."""
        weight_D, eps, rounding = block.norm1.weight, block.norm1.eps, self._rounding
        is_eight_bits, in_blocks = block.qkv.scale is not None, block.qkv.in_blocks
        if isinstance(x, Tensor):
            norm = (weight_D, modulation_BM6D, eps, rounding)
            if is_eight_bits:
                return x, Fp8Rows(*adaln.norm_modulate_fp8(x, *norm, in_blocks))
            return x, adaln.norm_modulate(x, *norm)
        gated = (x.x_BRD, x.branch_BRD, weight_D, x.modulation_BM6D, eps, rounding)
        if is_eight_bits:
            assert x.delta_BRD is None
            x_BRD, *quantized = adaln.add_norm_modulate_fp8(*gated, modulation_BM6D, in_blocks)
            return x_BRD, Fp8Rows(*quantized)
        return adaln.add_norm_modulate(*gated, x.delta_BRD, modulation_BM6D)

    @staticmethod
    def _terms(
        product: _Product, rows: Rows, dtype: torch.dtype
    ) -> tuple[Tensor, list[Tensor] | None]:
        """Outputs and, where a kernel is to add it, what is added to each linear's part."""
        if not product.sums_inside:
            return product.summed(rows, dtype), None
        return product(rows, dtype), product.deltas(rows)

    def place(
        self, layer: int, q_BRNK: Projected, k_BRNK: Projected, v_BRNK: Projected, slot: Slot
    ) -> Tensor:
        """Take what `project` returned."""
        block, placement = self._blocks[layer], slot.placement
        camera = placement.camera
        (q, q_delta), (k, k_delta), (v, v_delta) = map(_apart, (q_BRNK, k_BRNK, v_BRNK))
        return qknorm_rope.place(
            q, k, v, block.norm_q.weight, block.norm_k.weight, placement.cos_RK,
            placement.sin_RK, camera.query, camera.key_value, slot.key_BRNK, slot.value_BRNK,
            slot.raw_BRNK, block.norm_q.eps, self._rounding, q_delta, k_delta, v_delta,
        )  # fmt: skip

    def output(self, layer: int, o_BRNK: Tensor, placement: Placement) -> Rows:
        """Return [B, R, N, K], or codes [B, R, N*K].

        Where a rank has some of the heads only, rows are quantised after they are joined.
        """
        start, matrix = placement.cos_RK.shape[-1], placement.camera.output
        has_all_heads = o_BRNK.shape[2] == self._heads
        out = self._blocks[layer].out
        if out.scale is not None and has_all_heads:
            return Fp8Rows(*qknorm_rope.turn_output_fp8(o_BRNK, matrix, start, out.in_blocks))
        return qknorm_rope.turn_output(o_BRNK, matrix, start).unflatten(-1, (-1, self._width))

    def finish(self, layer: int, x_BRD: Tensor, o: Rows, modulation_BM6D: Tensor) -> Gated:
        """Take what `output` returned; the last sum is left to what reads it."""
        block, rounding, dtype = self._blocks[layer], self._rounding, x_BRD.dtype
        merged: Rows = o.flatten(-2) if isinstance(o, Tensor) else o
        branch_BRD, delta = self._terms(block.out, merged, dtype)
        norm = (block.norm2.weight, modulation_BM6D, block.norm2.eps, rounding)
        rows: Rows
        if block.up.scale is None:
            x_BRD, rows = adaln.add_norm_modulate(x_BRD, branch_BRD, *norm, _only(delta))
        else:
            x_BRD, *quantized = adaln.add_norm_modulate_fp8(
                x_BRD, branch_BRD, *norm, in_blocks=block.up.in_blocks
            )
            rows = Fp8Rows(*quantized)
        z_BRF, delta = self._terms(block.up, rows, dtype)
        if block.down.scale is None:
            rows = swiglu.swiglu(z_BRF, rounding, _only(delta))
        else:
            rows = Fp8Rows(*swiglu.swiglu_fp8(z_BRF, rounding, block.down.in_blocks))
        branch_BRD, delta = self._terms(block.down, rows, dtype)
        return Gated(x_BRD, branch_BRD, _only(delta), modulation_BM6D)

    def settle(self, x: Residual) -> Tensor:
        """Form the sum behind the last block."""
        if isinstance(x, Tensor):
            return x
        return adaln.add_gated(
            x.x_BRD, x.branch_BRD, x.modulation_BM6D, self._rounding, x.delta_BRD
        )

    def rotate(self, raw_BRNK: Tensor, cos_RK: Tensor, sin_RK: Tensor, key_BRNK: Tensor) -> None:
        """Rotate in place."""
        qknorm_rope.rotate(raw_BRNK, cos_RK, sin_RK, key_BRNK, self._rounding)

    def slide(self, buffers: CacheBuffers, window: WindowViews, slot: int) -> None:
        """Move and rotate in one launch, which also summarizes blocks that are long enough."""
        summaries = [each for each in window.summaries if each is not None]
        block = summaries[0].block if summaries else 0
        inside = summaries if block >= sparse.LEAST_KERNEL_BLOCK else []
        slide.slide(
            window.keys_BSNK, window.values_BSNK, buffers.raw_BSNK, buffers.newest_BRNK,
            buffers.cos_SK, buffers.sin_SK, [each.mean_BNJK for each in inside],
            [each.sum_BNJK for each in inside], [each.reach_BNJ for each in inside], slot, block,
            self._rounding,
        )  # fmt: skip
        if summaries and not inside:
            window.renew_summaries(buffers.raw_BSNK[0].shape[1] + buffers.newest_BRNK[0].shape[1])


def _apart(projected: Projected) -> tuple[Tensor, Tensor | None]:
    """Base and delta."""
    return (projected, None) if isinstance(projected, Tensor) else (projected.base, projected.delta)


def _only(deltas: list[Tensor] | None) -> Tensor | None:
    """Delta of a product of one linear."""
    return None if deltas is None else deltas[0]


def _product(modules: Sequence[nn.Module]) -> _Product:
    """One product of the linears side by side."""
    if any(isinstance(module, LoraLinear) for module in modules):
        bases = [each.base if isinstance(each, LoraLinear) else each for each in modules]
        return dataclasses.replace(_product(bases), adapted=tuple(modules))
    kinds = [type(module).__name__ for module in modules]
    if all(isinstance(module, Fp8Linear) for module in modules):
        return _Product(weight_NK=_joined(modules, "codes_NK"), scale=_joined(modules, "scale"))
    if all(isinstance(module, nn.Linear) for module in modules):
        return _Product(weight_NK=_joined(modules, "weight"), scale=None)
    raise UnsupportedError(
        f"linears are {', '.join(kinds)}; allowed: Linear, or Fp8Linear for all that go together"
    )


def _joined(modules: Sequence[nn.Module], name: str) -> Tensor:
    """Join a tensor of each module along axis 0; the modules get views of the whole."""
    parts: list[Tensor] = [getattr(module, name).detach() for module in modules]
    joined = _in_one_piece(parts)
    if joined is None:
        joined = torch.cat(parts)
        views = joined.split([part.shape[0] for part in parts])
        for module, view in zip(modules, views, strict=True):
            getattr(module, name).data = view
    return joined


def _in_one_piece(parts: Sequence[Tensor]) -> Tensor | None:
    """Return the tensor that the parts make along axis 0 if they lie one behind the other."""
    first, offset = parts[0], parts[0].storage_offset()
    for part in parts:
        is_next = part.storage_offset() == offset and part.is_contiguous()
        if part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr() or not is_next:
            return None
        offset += part.numel()
    shape = (sum(part.shape[0] for part in parts), *first.shape[1:])
    return first.as_strided(shape, first.stride(), first.storage_offset())
