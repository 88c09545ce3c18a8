"""The H3 autoencoders on a GPU: near the CPU in fp32, compiled and batched near eager in bf16."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from graphs.compile import CompileMode
from tests.tolerances import PARITY_ATOL, VIT_KERNEL_RATIO
from tests.vae_stream.h3_tiny import random_vit, randomise
from vae_stream import TinyDecoder
from vae_stream.encoder import ImageEncoder
from vae_stream.h3_encoder import H3Encoder, H3EncoderConfig
from vae_stream.taeh3 import Taeh3, Taeh3Config
from vae_stream.tiling import Tiling
from vae_stream.vit import VitConfig
from vae_stream.window_fused import FusedWindows
from vae_stream.windowed import WindowedDecoder

pytestmark = [
    pytest.mark.gpu,
    # The compiler gives advice about settings that would change the numbers.
    pytest.mark.filterwarnings("ignore::UserWarning:torch.*"),
]

LATENTS = 8


@pytest.fixture(autouse=True)
def _fp32_is_fp32() -> Iterator[None]:
    torch.use_deterministic_algorithms(False)
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def windowed(
    device: str,
    dtype: torch.dtype,
    *,
    tile_batch: int | None = 1,
    mode: CompileMode = CompileMode.EAGER,
) -> WindowedDecoder:
    return WindowedDecoder(
        random_vit().cast_blocks(dtype).to(device),
        height_px=96,
        width_px=128,
        tiling=Tiling(tile_px=64, overlap_px=16),
        tile_batch=tile_batch,
        compile_mode=mode,
    )


def frames(decoder: WindowedDecoder) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return decoder.clip_frames(torch.randn(1, 24, LATENTS, 6, 8, generator=generator)).cpu()


def test_windowed_frames_are_those_of_a_cpu() -> None:
    torch.testing.assert_close(
        frames(windowed("cuda", torch.float32)),
        frames(windowed("cpu", torch.float32)),
        atol=PARITY_ATOL,
        rtol=PARITY_ATOL,
    )


@pytest.mark.parametrize(
    ("tile_batch", "mode"),
    [(1, CompileMode.BLOCKS), (6, CompileMode.EAGER), (3, CompileMode.BLOCKS)],
    ids=["compiled", "batched", "both"],
)
def test_compiled_and_batched_frames_are_as_near_fp32_as_eager_ones(
    tile_batch: int, mode: CompileMode
) -> None:
    exact = frames(windowed("cpu", torch.float32))
    eager = frames(windowed("cuda", torch.bfloat16))

    made = frames(windowed("cuda", torch.bfloat16, tile_batch=tile_batch, mode=mode))

    # Rounded in other places: twice the distance of the same dtype, and one bf16 step of 4.
    assert (made - exact).abs().max() <= 2 * (eager - exact).abs().max() + 2**-6
    assert (made - exact).square().mean() <= 4 * (eager - exact).square().mean()


@pytest.mark.parametrize("mode", [CompileMode.EAGER, CompileMode.BLOCKS])
def test_tiles_of_the_released_size_are_as_near_to_fp32_as_the_network(mode: CompileMode) -> None:
    """As many rows as in use: attention has a tile of its own for these, the gate its product."""
    config = VitConfig(layer_count=2, head_count=2, ffn_width=128)
    z_BCTHW = torch.randn(3, 24, 7, 16, 16, generator=torch.Generator().manual_seed(7)).cuda()
    exact = random_vit(config).cuda()(z_BCTHW)
    vit = random_vit(config).cast_blocks(torch.bfloat16).cuda()

    made = FusedWindows(vit, mode)(z_BCTHW)

    far, allowed = ((each - exact).square().mean().sqrt() for each in (made, vit(z_BCTHW)))
    assert far <= VIT_KERNEL_RATIO * allowed


def test_streamed_pictures_stay_on_the_gpu_and_are_those_of_the_whole_decode() -> None:
    decoder = windowed("cuda", torch.bfloat16, tile_batch=3)
    latents = torch.randn(1, 24, LATENTS, 6, 8, device="cuda")
    state = decoder.new_state()
    chunks = [c for n in range(LATENTS) for c in decoder.push(state, latents[:, :, n])]
    chunks += decoder.flush(state)

    streamed = torch.cat([chunk.frames_THWC for chunk in chunks])

    assert streamed.device.type == "cuda"
    # The batches of a window and of a clip are of one size here, so the same kernels run.
    assert torch.equal(streamed, decoder.decode_clip(latents))


def test_taeh3_makes_the_pictures_of_a_cpu() -> None:
    made = []
    for device in ("cpu", "cuda"):
        network = Taeh3(Taeh3Config(decoder_widths=(32, 24, 16, 16), encoder_width=16))
        randomise(network)
        decoder = TinyDecoder(
            network.eval().requires_grad_(False).to(device), height_px=64, width_px=96
        )
        state = decoder.new_state()
        generator = torch.Generator().manual_seed(3)
        latents = torch.randn(7, 1, 24, 4, 6, generator=generator)
        made.append(torch.cat([decoder.push(state, z)[0].frames_THWC.cpu() for z in latents]))

    apart = (made[0].int() - made[1].int()).abs()
    assert apart.max() <= 1
    assert apart.float().mean() < 1e-2


def test_the_first_picture_has_the_latent_of_a_cpu() -> None:
    rgb_HWC = torch.randint(0, 256, (96, 80, 3), dtype=torch.uint8)
    made = []
    for device in ("cpu", "cuda"):
        config = H3EncoderConfig(widths=(8, 8, 16, 16, 16, 16), block_count=1, norm_groups=4)
        network = H3Encoder(config, tiling=Tiling(tile_px=64, overlap_px=16))
        randomise(network)
        encoder = ImageEncoder(network.eval().requires_grad_(False).to(device))
        made.append(encoder.encode_image(rgb_HWC).cpu())

    # The latent is rounded to fp16 before it is scaled: a value on an edge may move by a step.
    torch.testing.assert_close(made[0], made[1], atol=2e-2, rtol=1e-3)
    assert (made[0] - made[1]).abs().mean() < 1e-4
