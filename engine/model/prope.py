"""Fused projective camera encoding (PRoPE) of SolarWM-H3.

Owns the 4x4 matrices that act on the head channels which RoPE leaves alone, and the order of
their roundings. A camera enters the model here and nowhere else; there are no weights.
Shape suffixes: B batch, R rows, N heads, K head width, G camera groups (rows that share a
matrix), 44 a matrix.

Source: SolarWM-H3 camera code; per row P = K4 * W with W the compressed world-to-camera view:
queries take P^T, keys and values P^-1, and the attention output of the query row takes P.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FOCAL_X = 969.6969696969696 / 1920
FOCAL_Y = 969.6969696969696 / 1080


@dataclass(frozen=True, kw_only=True, slots=True)
class Projective:
    """The three matrices of each camera, [..., 4, 4] each."""

    query: Tensor
    key_value: Tensor
    output: Tensor


def compress_views(views_44: Tensor, dtype: torch.dtype) -> Tensor:
    """Apply "logd4": t <- t * log1p(|t|) / (4 |t|), rotation untouched.

    The views are rounded to ``dtype`` first, the compression runs in fp32 on those values.
    """
    rounded_44 = views_44.to(dtype)
    translation = rounded_44[..., :3, 3].float()
    length = translation.norm(dim=-1, keepdim=True)
    scale = torch.where(length > 0, torch.log1p(length) / (4 * length), 0.0)
    compressed_44 = rounded_44.clone()
    compressed_44[..., :3, 3] = (translation * scale).to(dtype)
    return compressed_44


def projective(views_44: Tensor, dtype: torch.dtype) -> Projective:
    """Build the matrices of world-to-camera views [..., 4, 4] relative to the first frame.

    Args:
        views_44: relative views, before compression.
        dtype: what every matrix is rounded to. Sums run in fp32 and round once; the focal pair
            and its reciprocals are rounded too, so P * P^-1 is not exactly the identity in
            bf16. The released model was trained with just that.
    """
    view_44 = compress_views(views_44, dtype).float()
    focal = torch.tensor([FOCAL_X, FOCAL_Y, 1.0, 1.0], device=view_44.device).to(dtype)
    reciprocal = (1.0 / focal.float()).to(dtype)
    output_44 = (focal.float()[:, None] * view_44).to(dtype)
    rotation, translation = view_44[..., :3, :3], view_44[..., :3, 3]
    inverse_44 = torch.zeros_like(view_44)
    inverse_44[..., :3, :3] = rotation.mT
    inverse_44[..., :3, 3] = -(rotation * translation[..., :, None]).sum(-2).to(dtype).float()
    inverse_44[..., 3, 3] = 1.0
    key_value_44 = (inverse_44 * reciprocal.float()).to(dtype)
    return Projective(query=output_44.mT.contiguous(), key_value=key_value_44, output=output_44)


def identity_projective(dtype: torch.dtype, device: torch.device | None = None) -> Projective:
    """Return the matrices [1, 4, 4] of rows without a camera: text, anchor, audio.

    Their view is the identity but the focal lift still applies; leaving it out breaks parity.
    """
    return projective(torch.eye(4, device=device)[None], dtype)


def apply_prope(x_BRNK: Tensor, matrix_BG44: Tensor, start: int) -> Tensor:
    """Multiply the channels from ``start`` on, in groups of four, by each row's matrix.

    Args:
        x_BRNK: queries, keys, values or attention output.
        matrix_BG44: one matrix for each of G equal runs of rows; B may be 1.
        start: first channel that RoPE leaves alone.
    """
    suffix_BGRNC4 = (
        x_BRNK[..., start:].unflatten(-1, (-1, 4)).unflatten(1, (matrix_BG44.shape[-3], -1))
    )
    # Four multiply-adds instead of a batched 4x4 product: they fuse under a compiler, never go
    # through TF32 and keep one summation order on every device.
    columns = matrix_BG44[:, :, None, None, None].float().unbind(-1)
    terms = suffix_BGRNC4.float().unbind(-1)
    product = columns[0] * terms[0][..., None]
    for column, term in zip(columns[1:], terms[1:], strict=True):
        product = product + column * term[..., None]
    projected_BRNK = product.to(x_BRNK.dtype).flatten(1, 2).flatten(-2)
    return torch.cat([x_BRNK[..., :start], projected_BRNK], dim=-1)


def apply_prope_by_products(x_BRNK: Tensor, matrix_BG44: Tensor, start: int) -> Tensor:
    """Return `apply_prope` of the same arguments by one batched product in fp32.

    For a CPU without a compiler, where each multiply-add above is a pass over memory: 60 against
    118 us in bf16 and 56 against 216 us in fp32 for 200 rows of 6 heads (one core, 16 of 64
    channels). The sums may be ordered otherwise, which fp32 sees in the last bit. The matrix is
    repeated on a diagonal for all groups of four, because products of width four are slow.
    """
    batch_size, rows, heads, width = x_BRNK.shape
    groups, count = matrix_BG44.shape[-3], (width - start) // 4
    eye = torch.eye(count, device=x_BRNK.device)
    transposed_BG44 = matrix_BG44.float().mT.expand(batch_size, -1, -1, -1)
    wide_BGCC = (eye[:, None, :, None] * transposed_BG44[:, :, None, :, None, :]).reshape(
        batch_size * groups, width - start, width - start
    )
    suffix_BGRC = (
        x_BRNK[..., start:]
        .float()
        .reshape(batch_size * groups, rows // groups * heads, width - start)
    )
    placed_BRNK = x_BRNK.clone(memory_format=torch.contiguous_format)
    placed_BRNK[..., start:] = torch.bmm(suffix_BGRC, wide_BGCC).view(
        batch_size, rows, heads, width - start
    )
    return placed_BRNK
