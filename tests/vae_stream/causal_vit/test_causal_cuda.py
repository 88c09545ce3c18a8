"""The causal ViT decoder on a GPU: kernels, compiled and recorded calls, memory, no waiting."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

from tests.tolerances import VIT_KERNEL_RATIO, VIT_STATE_ATOL
from tests.vae_stream.causal_vit import attention_cases
from tests.vae_stream.causal_vit.golden_vit import golden, golden_vit
from tests.vae_stream.h3_tiny import random_vit
from vae_stream.causal_vit import CausalConfig, CausalVitDecoder, Form, Mode
from vae_stream.causal_vit.modes import kinds
from vae_stream.decoder import FrameChunk
from vae_stream.vit import VitConfig

pytestmark = [
    pytest.mark.gpu,
    # The compiler gives advice about settings that would change the numbers.
    pytest.mark.filterwarnings("ignore::UserWarning:torch.*"),
]

CONFIG = VitConfig(layer_count=4, head_count=4, ffn_width=512)
HEIGHT, WIDTH = 18, 21
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def _as_in_use() -> None:
    """Leave the checks of determinism off: they fill fresh memory, which a graph would record."""
    torch.use_deterministic_algorithms(False)


def opened(
    mode: Mode, form: Form, dtype: torch.dtype, size: tuple[int, int] = (HEIGHT, WIDTH)
) -> CausalVitDecoder:
    vit = random_vit(CONFIG).cast_blocks(dtype).to(CUDA)
    height_px, width_px = (16 * each for each in size)
    return CausalVitDecoder(vit, height_px=height_px, width_px=width_px, mode=mode, form=form)


def latents(count: int, size: tuple[int, int] = (HEIGHT, WIDTH)) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 1, 24, *size, generator=generator).to(CUDA)


def decoded(
    decoder: CausalVitDecoder, z_ZBFHW: Tensor, first: int = 0
) -> tuple[list[FrameChunk], dict[str, Tensor]]:
    state = decoder.new_state(first)
    chunks = [chunk for z in z_ZBFHW for chunk in decoder.push(state, z)]
    return chunks, dict(state.snapshot().tensors)


def frames(chunks: list[FrameChunk]) -> Tensor:
    return torch.cat([chunk.frames_THWC for chunk in chunks]).float()


@pytest.mark.parametrize("case", attention_cases.CASES, ids=lambda case: case.name)
def test_kernels_agree_with_the_plain_form(case: attention_cases.AttentionCase) -> None:
    assert attention_cases.complaints(case, CUDA) == []


@pytest.mark.parametrize(
    ("mode", "size", "count"),
    [
        (Mode.HYBRID_A3, (HEIGHT, WIDTH), 12), (Mode.SINGLE_A1, (HEIGHT, WIDTH), 12),
        (Mode.SINGLE_A5, (HEIGHT, WIDTH), 12),
        # Rows enough for the gated product: one latent's at 1344x768, and a pair's.
        (Mode.HYBRID_A3, (48, 84), 4),
    ],
)  # fmt: skip
def test_bf16_is_as_near_to_fp32_as_the_plain_form(
    mode: Mode, size: tuple[int, int], count: int
) -> None:
    z = latents(count, size)
    exact, exact_state = decoded(opened(mode, Form.PLAIN, torch.float32, size), z)
    plain, plain_state = decoded(opened(mode, Form.PLAIN, torch.bfloat16, size), z)
    fused, fused_state = decoded(opened(mode, Form.RECORDED, torch.bfloat16, size), z)

    for name in ("keys", "values"):
        far = (fused_state[name].float() - exact_state[name]).square().mean().sqrt()
        allowed = (plain_state[name].float() - exact_state[name]).square().mean().sqrt()
        assert far <= VIT_KERNEL_RATIO * allowed, name
    far, allowed = ((frames(run) - frames(exact)).square().mean() for run in (fused, plain))
    assert far <= VIT_KERNEL_RATIO**2 * allowed
    assert [chunk.latent_index for chunk in fused] == [chunk.latent_index for chunk in exact]


def test_fp32_is_that_of_the_public_code() -> None:
    tensors = golden("w4")
    height, width = tensors["in.z"].shape[2:]
    decoder = CausalVitDecoder(
        golden_vit(torch.float32).to(CUDA), height_px=16 * height, width_px=16 * width,
        mode=Mode.PAIR, causal=CausalConfig(window=4), form=Form.RECORDED,
    )  # fmt: skip
    _, state = decoded(decoder, tensors["in.z"][:14, None].to(CUDA))
    expected = tensors["fp32.ring_k.c6.L1"].flatten(2).to(CUDA)
    ring_R = decoder._calls.plans[1].ring_R
    torch.testing.assert_close(state["keys"][1][:, ring_R], expected, atol=VIT_STATE_ATOL, rtol=0)


@pytest.mark.parametrize("mode", Mode)
def test_recorded_calls_make_the_bits_of_compiled_ones(mode: Mode) -> None:
    z = latents(12)
    compiled = opened(mode, Form.COMPILED, torch.bfloat16)
    recorded = opened(mode, Form.RECORDED, torch.bfloat16)
    for first in (0, 0, 1000):  # streams find more recorded, and take the memory of the one before
        expected, expected_state = decoded(compiled, z, first)
        got, state = decoded(recorded, z, first)
        assert torch.equal(frames(got), frames(expected))
        assert all(torch.equal(state[name], each) for name, each in expected_state.items())
    runner = recorded.runner
    assert runner is not None
    assert runner.counts.captures == len(kinds(mode))
    assert runner.counts.failures == runner.counts.unlisted == 0
    recorded.close()


def test_recorded_calls_of_many_rows_make_the_bits_of_compiled_ones() -> None:
    """With the gated product, which writes by descriptors that a graph keeps."""
    size = (48, 84)
    z = latents(6, size)
    compiled, recorded = (
        opened(Mode.PAIR, form, torch.bfloat16, size) for form in (Form.COMPILED, Form.RECORDED)
    )
    for _ in range(2):
        expected, got = decoded(compiled, z)[0], decoded(recorded, z)[0]
        assert torch.equal(frames(got), frames(expected))


def test_a_snapshot_replays_the_same_frames() -> None:
    decoder, z = opened(Mode.HYBRID_A3, Form.RECORDED, torch.bfloat16), latents(20)
    state = decoder.new_state()
    for latent in z[:9]:
        decoder.push(state, latent)
    point = state.snapshot()
    first = [chunk for latent in z[9:] for chunk in decoder.push(state, latent)]
    state.restore(point)
    second = [chunk for latent in z[9:] for chunk in decoder.push(state, latent)]
    assert torch.equal(frames(first), frames(second))


@pytest.mark.parametrize("mode", [Mode.HYBRID_A3, Mode.SINGLE_A5])
def test_a_long_stream_allocates_nothing_and_waits_for_nothing(mode: Mode) -> None:
    decoder, z = opened(mode, Form.RECORDED, torch.bfloat16), latents(10)
    state = decoder.new_state()
    for latent in [*z, *z]:
        decoder.push(state, latent)
    gc.collect()  # what other tests left, which would go at any time
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for index in range(200):
            decoder.push(state, z[index % 10])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    for name in ("segment.all.allocated", "reserved_bytes.all.current", "num_ooms"):
        assert after[name] == before[name], name
    grown = after["allocated_bytes.all.current"] - before["allocated_bytes.all.current"]
    assert abs(grown) < 2**20


def test_memory_of_a_state_is_as_computed() -> None:
    decoder = opened(Mode.PAIR, Form.RECORDED, torch.bfloat16)
    gc.collect()
    before = torch.cuda.memory_allocated()
    state = decoder.new_state()
    # Each of four tensors is rounded up to 512 bytes.
    assert 0 <= torch.cuda.memory_allocated() - before - decoder.state_bytes() < 4 * 512
    del state


def test_a_latent_that_is_not_finite_is_told_later() -> None:
    decoder, z = opened(Mode.SINGLE_A4, Form.PLAIN, torch.bfloat16), latents(3)
    state = decoder.new_state()
    decoder.push(state, z[0])
    torch.cuda.synchronize()
    z[1, 0, 3, 2, 1] = torch.nan
    decoder.push(state, z[1])
    torch.cuda.synchronize()
    with pytest.raises(ValueError, match="NaN or Inf at latent 1"):
        decoder.push(state, z[2])
