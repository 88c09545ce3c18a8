"""The transformer against diffusers' MiniMaxH3Transformer3DModel on random weights."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.block_ops import PlainBlockOps
from engine.checkpoint.layouts import to_diffusers, to_original
from engine.config import Geometry, ModelConfig
from engine.model.dit import MiniMaxH3Transformer
from engine.model.rope import apply_rope, rope_tables
from tests.tolerances import PARITY_ATOL

pytestmark = pytest.mark.cpu

CONFIG = ModelConfig(
    num_attention_heads=4, attention_head_dim=32, hidden_size=96, num_layers=3,
    num_refiner_layers=2, ffn_dim=160, in_channels=24, audio_in_channels=32, text_dim=40,
    freq_dim=16, time_embed_hidden_dim=96, time_embed_dim=48, rope_freq_dim=4,
    geometry=Geometry(height_px=64, width_px=96),
)  # fmt: skip
CONSTRUCTOR_KEYS = [
    "num_attention_heads", "attention_head_dim", "hidden_size", "num_layers", "num_refiner_layers",
    "ffn_dim", "in_channels", "audio_in_channels", "patch_size", "text_dim", "freq_dim",
    "time_embed_hidden_dim", "time_embed_dim", "rope_freq_dim", "rope_theta", "norm_eps",
    "qk_norm_eps", "final_norm_eps",
]  # fmt: skip


class FullAttend:
    """All rows see all rows: rotary embedding and no camera, the base model's attention."""

    def __init__(self, positions_R3: Tensor, config: ModelConfig) -> None:
        self.tables = rope_tables(positions_R3, config.rope_freq_dim, config.rope_theta)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = apply_rope(q, *self.tables), apply_rope(k, *self.tables)
        heads = (a.transpose(1, 2) for a in (q, k, v))
        return F.scaled_dot_product_attention(*heads).transpose(1, 2)

    def store(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        raise AssertionError("the base model keeps nothing")


def full_forward(
    model: MiniMaxH3Transformer,
    video: Tensor,
    audio: Tensor,
    text: Tensor,
    times: Tensor,
    time_index: Tensor,
    tags: Tensor,
    positions: Tensor,
    where: dict[str, Tensor],
) -> tuple[Tensor, Tensor]:
    """Run the base model: one packed sequence, every row with its own time and tag."""
    rows = tags.numel()
    x = torch.zeros(1, rows, model.config.hidden_size)
    x[:, where["text"]] = model.refine_text(text)
    x[:, where["video"]] = model.embed_video(video)
    x[:, where["audio"]] = model.embed_audio(audio)
    temb = model.time_embedding(times)
    layers = range(model.config.num_layers)
    modulations = [model.modulation(layer, temb)[time_index, tags][None] for layer in layers]
    x = model.run_blocks(x, modulations, FullAttend(positions, model.config), PlainBlockOps(model))
    final = model.final_modulation(temb)[time_index][None]
    return (
        model.head_video(x, final)[:, where["video"]],
        model.head_audio(x, final)[:, where["audio"]],
    )


def random_case(seed: int) -> dict:
    """Rows in a random layout: text (some of it vision rows), keyframes or none, audio, video."""
    generator = torch.Generator().manual_seed(seed)

    def count(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    text, keyframe, audio, latents = count(1, 24), 6 * count(0, 3), 2 * count(1, 12), count(1, 8)
    target = 6 * latents
    rows = text + keyframe + audio + target
    tags = torch.cat(
        [
            torch.randint(0, 2, (text,), generator=generator),
            torch.zeros(keyframe).long(),
            torch.full((audio,), 2),
            torch.zeros(target).long(),
        ]
    )
    times = torch.tensor([0.25, 0.6, 0.999])
    time_index = torch.cat(
        [
            torch.zeros(text),
            torch.full((keyframe,), 2.0),
            torch.ones(audio),
            torch.zeros(target),
        ]
    ).long()
    order = torch.arange(rows)
    first = text + keyframe
    video = torch.cat([order[text:first], order[first + audio :]])
    return {
        "video": torch.randn(1, video.numel(), 96, generator=generator),
        "audio": torch.randn(1, audio, 32, generator=generator),
        "text": torch.randn(1, text, CONFIG.text_dim, generator=generator),
        "times": times,
        "time_index": time_index,
        "tags": tags,
        "positions": 40 * torch.rand(rows, 3, generator=generator, dtype=torch.float64),
        "where": {"text": order[:text], "video": video, "audio": order[first : first + audio]},
    }


@pytest.fixture(scope="module")
def pair():
    """Upstream model and ours with the same random weights."""
    from diffusers import MiniMaxH3Transformer3DModel

    torch.manual_seed(3)
    keys = {key: getattr(CONFIG, key) for key in CONSTRUCTOR_KEYS}
    upstream = MiniMaxH3Transformer3DModel(**keys).eval().requires_grad_(False)
    for name, parameter in upstream.named_parameters():
        if parameter.ndim == 1:
            parameter.data = (1.0 if "norm" in name else 0.0) + 0.2 * torch.randn(parameter.shape)
        else:
            parameter.data = 0.15 * torch.randn(parameter.shape)
    ours = MiniMaxH3Transformer(CONFIG).eval().requires_grad_(False)
    ours.load_state_dict(upstream.state_dict())
    return upstream, ours


@pytest.mark.parametrize("seed", range(50))
def test_random_layouts_agree(pair, seed):
    upstream, ours = pair
    case = random_case(seed)
    video, audio = full_forward(ours, **case)
    expected_video, expected_audio = upstream(
        hidden_states=case["video"],
        audio_hidden_states=case["audio"],
        encoder_hidden_states=case["text"],
        timestep=case["times"],
        timestep_indices=case["time_index"],
        token_tags=case["tags"],
        position_ids=case["positions"],
        video_indices=case["where"]["video"],
        audio_indices=case["where"]["audio"],
        text_indices=case["where"]["text"],
        return_dict=False,
    )
    assert (video - expected_video).abs().max() <= PARITY_ATOL
    assert (audio - expected_audio).abs().max() <= PARITY_ATOL


@pytest.mark.parametrize("layout", ["interleaved", "stacked"])
def test_names_round_trip_bit_equal(pair, layout):
    weights = dict(pair[0].state_dict())
    original = to_original(weights, CONFIG, layout)
    back = {
        item.name: item.tensor
        for name, tensor in original.items()
        for item in to_diffusers(name, tensor, CONFIG, layout)
    }
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], weights[name]) for name in weights)


def test_original_names_and_order_of_rows(pair):
    weights = dict(pair[0].state_dict())
    original = to_original(weights, CONFIG)
    expected_count = 10 * CONFIG.num_layers + 8 * CONFIG.num_refiner_layers + 1 + 6 + 4 + 3 + 4
    assert len(original) == expected_count
    fused = original["blocks.1.attn.qkv_proj.weight"]
    query = weights["transformer_blocks.1.attn.to_q.weight"]
    key = weights["transformer_blocks.1.attn.to_k.weight"]
    assert torch.equal(fused[96:128], query[32:64])  # head 1 starts after q, k, v of head 0
    assert torch.equal(fused[32:64], key[:32])
    gated = weights["token_refiner.refiner_blocks.0.ff.net.0.proj.weight"]
    assert torch.equal(original["token_refiner.blocks.0.mlp.fc1.weight"][:160], gated[160:])


@pytest.mark.parametrize("layout", ["interleaved", "stacked"])
def test_official_single_file_conversion_agrees(pair, layout):
    from diffusers.loaders import single_file_utils

    weights = dict(pair[0].state_dict())
    converted = single_file_utils.convert_minimax_h3_transformer_checkpoint_to_diffusers(
        to_original(weights, CONFIG, layout), dict(pair[0].config), qkv_layout=layout
    )
    assert converted.keys() == weights.keys()
    assert all(torch.equal(converted[name], weights[name]) for name in weights)
