"""The network: one function whether run at once or step by step, and causal."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.tolerances import VAE_STREAMED_ATOL
from vae_stream.taehv import MemoryBlock, TinyVae, TinyVaeConfig, pixel_shuffle

pytestmark = pytest.mark.cpu

HEIGHT, WIDTH = 3, 5


@pytest.fixture(scope="module")
def vae() -> TinyVae:
    torch.manual_seed(3)
    mean = tuple(0.1 * c for c in range(24))
    std = tuple(0.5 + 0.05 * c for c in range(24))
    config = TinyVaeConfig(
        decoder_widths=(24, 16, 12),
        head_width=4,
        encoder_widths=(16, 16, 24),
        latents_mean=mean,
        latents_std=std,
    )
    return TinyVae(config).eval().requires_grad_(False)


def stepwise(vae: TinyVae, latents_BTCHW: Tensor) -> tuple[Tensor, list[Tensor]]:
    state = vae.decoder.zero_state(latents_BTCHW.shape[0], *latents_BTCHW.shape[3:])
    frames = []
    for n in range(latents_BTCHW.shape[1]):
        one = vae.denormalise(latents_BTCHW[:, n : n + 1])
        made, state = vae.decoder(one, state, last_frame_only=n % 5 == 0)
        frames.append(made)
    return torch.cat(frames, 1), state


def test_streamed_equals_parallel(vae: TinyVae) -> None:
    latents = torch.randn(2, 15, 24, HEIGHT, WIDTH)

    whole, whole_state = vae.decode(latents)
    streamed, state = stepwise(vae, latents)

    assert streamed.shape == whole.shape == (2, 51, 3, 16 * HEIGHT, 16 * WIDTH)
    torch.testing.assert_close(streamed, whole, atol=VAE_STREAMED_ATOL, rtol=0)
    torch.testing.assert_close(state, whole_state, atol=VAE_STREAMED_ATOL, rtol=0)


def test_blocks_continue_from_the_state_of_the_block_before(vae: TinyVae) -> None:
    latents = torch.randn(1, 10, 24, HEIGHT, WIDTH)

    first, state = vae.decode(latents[:, :5])
    second, _ = vae.decode(latents[:, 5:], state)

    whole, _ = vae.decode(latents)
    torch.testing.assert_close(torch.cat([first, second], 1), whole, atol=VAE_STREAMED_ATOL, rtol=0)
    alone, _ = vae.decode(latents[:, 5:])
    assert not torch.allclose(alone, second, atol=1e-3)


@pytest.mark.parametrize("changed", [1, 4, 5, 9])
def test_a_later_latent_never_changes_an_earlier_frame(vae: TinyVae, changed: int) -> None:
    latents = torch.randn(1, 10, 24, HEIGHT, WIDTH)
    other = latents.clone()
    other[:, changed] += 1

    before = changed // 5 * 17 + (0 if changed % 5 == 0 else changed % 5 * 4 - 3)
    made, changed_made = vae.decode(latents)[0], vae.decode(other)[0]

    assert torch.equal(made[:, :before], changed_made[:, :before])
    assert not torch.equal(made[:, before], changed_made[:, before])


def test_the_lone_last_frame_is_the_fourth_of_all(vae: TinyVae) -> None:
    state = [torch.randn_like(m) for m in vae.decoder.zero_state(1, HEIGHT, WIDTH)]
    latent = torch.randn(1, 1, 24, HEIGHT, WIDTH)

    whole, whole_state = vae.decoder(latent, state)
    last, last_state = vae.decoder(latent, state, last_frame_only=True)

    torch.testing.assert_close(last, whole[:, 3:], atol=VAE_STREAMED_ATOL, rtol=0)
    assert all(torch.equal(a, b) for a, b in zip(last_state, whole_state, strict=True))


def test_a_memory_block_equals_the_concatenating_form() -> None:
    block = MemoryBlock(6).double()
    joined = nn.Conv2d(12, 6, 3, padding=1).double()
    joined.weight.data = torch.cat([block.now.weight, block.past.weight], 1)
    joined.bias = block.now.bias
    x = torch.randn(7, 6, 5, 4).double()

    made, _ = block(x, torch.zeros(1, 6, 5, 4).double())

    before = torch.cat([torch.zeros_like(x[:1]), x[:-1]])
    expected = F.relu(x + block.out(F.relu(joined(torch.cat([x, before], 1)))))
    torch.testing.assert_close(made, expected)  # float64 defaults: 1e-7


def test_pixel_shuffle_is_torch_s_with_reordered_channels() -> None:
    x = torch.randn(2, 4 * 5, 3, 7)

    ours = pixel_shuffle(x)

    torch_order = x.unflatten(1, (4, 5)).transpose(1, 2).flatten(1, 2)
    assert torch.equal(ours, F.pixel_shuffle(torch_order, 2))


def test_the_encoder_sees_each_block_alone(vae: TinyVae) -> None:
    frames = torch.rand(1, 34, 3, 48, 80)
    other = frames.clone()
    other[:, :17] = torch.rand(1, 17, 3, 48, 80)

    latents, other_latents = vae.encode(frames), vae.encode(other)

    assert latents.shape == (1, 10, 24, 3, 5)
    assert torch.equal(latents[:, 5:], other_latents[:, 5:])
    assert not torch.equal(latents[:, :5], other_latents[:, :5])


def test_the_encoder_is_causal_inside_a_block(vae: TinyVae) -> None:
    frames = torch.rand(1, 17, 3, 32, 32)
    other = frames.clone()
    other[:, 5:] = 0.5

    latents, other_latents = vae.encode(frames), vae.encode(other)

    assert torch.equal(latents[:, :2], other_latents[:, :2])  # latent 1 ends with frame 4
    assert not torch.equal(latents[:, 2], other_latents[:, 2])


def test_latents_are_bounded_before_normalisation(vae: TinyVae) -> None:
    latents = vae.encode_unnormalised(100 * torch.randn(1, 17, 3, 32, 32))

    assert latents.abs().max() <= 3.0
    torch.testing.assert_close(vae.denormalise(vae.normalise(latents)), latents)


def test_a_cast_leaves_the_statistics_in_fp32(vae: TinyVae) -> None:
    half = TinyVae(vae.config).cast(torch.bfloat16)

    assert half.latents_mean.dtype == half.latents_std.dtype == torch.float32
    assert half.encode(torch.rand(1, 17, 3, 32, 32)).dtype == torch.float32


@pytest.mark.parametrize(
    "shape",
    [(1, 16, 3, 32, 32), (1, 17, 3, 40, 32), (1, 17, 3, 32, 24)],
    ids=["no-block", "height", "width"],
)
def test_frames_that_make_no_block_are_refused(vae: TinyVae, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="frames_BTCHW: shape"):
        vae.encode(torch.rand(shape))


def test_weights_and_config_survive_a_folder(vae: TinyVae, tmp_path: Path) -> None:
    vae.save_pretrained(tmp_path, dtype=torch.float32)

    read = TinyVae.from_pretrained(tmp_path)

    assert read.config == replace(
        vae.config,
        latents_mean=tuple(vae.latents_mean.flatten().tolist()),
        latents_std=tuple(vae.latents_std.flatten().tolist()),
    )
    assert all(torch.equal(a, b) for a, b in zip(read.parameters(), vae.parameters(), strict=True))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(
    ("old", "new"),
    [("head_width", "heads"), ('"latent_bound": 3.0,', "")],
    ids=["unknown", "missing"],
)
def test_a_config_with_other_keys_is_refused(old: str, new: str) -> None:
    text = TinyVaeConfig().to_json().replace(old, new)

    with pytest.raises(ValueError, match="config: missing or unknown"):
        TinyVaeConfig.from_json(text)


def test_a_config_with_too_few_means_is_refused() -> None:
    with pytest.raises(ValueError, match="latents_mean: 2 values; allowed: 24"):
        TinyVaeConfig(latents_mean=(0.0, 1.0))


def test_weights_of_another_shape_are_refused(vae: TinyVae, tmp_path: Path) -> None:
    vae.save_pretrained(tmp_path)
    config = replace(vae.config, head_width=8)
    (tmp_path / "config.json").write_text(config.to_json())

    with pytest.raises(ValueError, match=r"model\.safetensors"):
        TinyVae.from_pretrained(tmp_path)
