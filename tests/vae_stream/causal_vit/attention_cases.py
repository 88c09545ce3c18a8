"""Sizes of the fused attention of the causal ViT decoder, and its comparison with the plain one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.tolerances import FP32_ATOL, VIT_KERNEL_RATIO
from vae_stream.causal_vit import plain, window_attention
from vae_stream.causal_vit.places import RING_SLOTS, CausalConfig, plan_windows
from vae_stream.vit import VitConfig, rotate

SUFFIX = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionCase:
    """One call over a ring."""

    name: str
    heads: int
    height: int
    width: int
    window: int
    shift: int
    latents: int
    slots: tuple[int, ...]
    """Seen, oldest first, the call's own last."""
    dtype: torch.dtype
    is_full: bool = False
    """Of the released size; for a GPU."""


def _case(name: str, *sizes: int, slots: str, dtype: torch.dtype, **more: bool) -> AttentionCase:
    heads, height, width, window, shift, latents = sizes
    return AttentionCase(
        name=name, heads=heads, height=height, width=width, window=window, shift=shift,
        latents=latents, slots=tuple(map(int, slots)), dtype=dtype, **more,
    )  # fmt: skip


_BF16, _FP32 = torch.bfloat16, torch.float32
CASES = (
    _case("first", 1, 3, 6, 4, 0, 1, slots="0", dtype=_FP32),
    _case("pair-wrapped", 2, 3, 4, 4, 2, 2, slots="234501", dtype=_FP32),
    _case("five-slots", 3, 2, 3, 4, 0, 1, slots="50123", dtype=_FP32),
    _case("two-blocks-bf16", 1, 11, 13, 16, 0, 1, slots="450", dtype=_BF16),
    _case("480p-single", 32, 30, 52, 16, 0, 1, slots="450123", dtype=_BF16, is_full=True),
    _case("480p-pair", 32, 30, 52, 16, 8, 2, slots="234501", dtype=_BF16, is_full=True),
    _case("768p-single", 32, 48, 84, 16, 8, 1, slots="01234", dtype=_BF16, is_full=True),
    _case("768p-pair", 32, 48, 84, 16, 0, 2, slots="012345", dtype=_BF16, is_full=True),
    _case("768p-fp32", 4, 48, 84, 16, 8, 2, slots="501", dtype=_FP32, is_full=True),
)


@torch.no_grad()
def complaints(case: AttentionCase, device: torch.device) -> list[str]:
    """What is wrong with the fused operators; empty where all is well."""
    network = VitConfig(layer_count=1, head_count=case.heads)
    plan = plan_windows(
        case.height, case.width, case.shift, network=network,
        causal=CausalConfig(window=case.window), device=device,
    )  # fmt: skip
    tokens, own = case.height * case.width, case.slots[-case.latents :]
    rows = case.latents * tokens + SUFFIX
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int, dtype: torch.dtype = case.dtype) -> Tensor:
        values = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
        return values.to(dtype)

    qkv_RF, bias_F = random(rows, 3 * network.width) * 3, random(3 * network.width)
    ring = [random(RING_SLOTS, tokens, network.width) for _ in "kv"]
    angle_RA = random(rows, 24, dtype=torch.float32)
    cos_RA, sin_RA = angle_RA.cos(), angle_RA.sin()

    placed = [each.clone() for each in ring]
    own_C = torch.tensor(own, device=device)
    q_RD, last_key_RD, last_value_RD = window_attention.place(
        qkv_RF, bias_F, cos_RA, sin_RA, own_C, plan.ring_R, *placed, case.heads,
        window_attention.LOG2_E / 8, network.eps,
    )  # fmt: skip
    padded = (*case.slots, *([0] * (RING_SLOTS - len(case.slots))))
    out_RD = window_attention.attend(
        q_RD, *placed, last_key_RD, last_value_RD, torch.tensor(padded, device=device),
        torch.tensor([len(case.slots)], device=device), plan.token_WJ, plan.begin_W,
        plan.size_W, case.heads,
    )  # fmt: skip

    def plainly(dtype: torch.dtype) -> list[Tensor]:
        biased_RF = qkv_RF.to(dtype) + bias_F.to(dtype)
        q_RNK, k_RNK, v_RNK = biased_RF.unflatten(-1, (case.heads, 3, 64)).unbind(-2)
        q_RNK, k_RNK = (
            rotate(F.rms_norm(each.float(), (64,), eps=network.eps)[None], cos_RA[:, None],
                   sin_RA[:, None])[0].to(dtype)
            for each in (q_RNK, k_RNK)
        )  # fmt: skip
        rings = [each.clone().to(dtype) for each in ring]
        last = []
        for ring_SRD, rows_RNK in zip(rings, (k_RNK, v_RNK), strict=True):
            rows_CRD = rows_RNK[:-SUFFIX].unflatten(0, (-1, tokens)).flatten(2)
            for slot, rows_RD in zip(own, rows_CRD, strict=True):
                ring_SRD[slot, plan.ring_R] = rows_RD
            last.append(rows_RNK[-SUFFIX:])
        seen = [
            each[list(case.slots)][:, plan.ring_R].unflatten(-1, (case.heads, 64)) for each in rings
        ]
        out_RD = plain.attend(q_RNK, (seen[0], seen[1]), (last[0], last[1]), plan)
        return [q_RNK.flatten(1), *rings, *(each.flatten(1) for each in last), out_RD]

    unscaled_RD = q_RD.float() * 8 / window_attention.LOG2_E
    fused = [unscaled_RD, *placed, last_key_RD, last_value_RD, out_RD]
    names = ("q", "ring keys", "ring values", "suffix keys", "suffix values", "out")
    exact, same = plainly(torch.float32), plainly(case.dtype)
    wrong = []
    for name, got, reference, rounded in zip(names, fused, exact, same, strict=True):
        far, allowed = _rms(got, reference), FP32_ATOL
        if case.dtype != torch.float32:
            allowed = VIT_KERNEL_RATIO * _rms(rounded, reference)
        if not far <= allowed:
            wrong.append(f"{name}: {far:.1e} from fp32; allowed {allowed:.1e}")
    return wrong


def _rms(got: Tensor, expected: Tensor) -> float:
    return float((got.float() - expected).square().mean().sqrt())
