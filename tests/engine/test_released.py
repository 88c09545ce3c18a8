"""Released layouts of the transformer: each comes in whole, and each fault is named."""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.checkpoint import reading
from engine.checkpoint.folder import read_config, sampled_hash
from engine.checkpoint.reading import TensorReader, load_model
from engine.checkpoint.shards import read_shard
from engine.checkpoint.source import Source, open_source
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import CheckpointError, UnsupportedError
from engine.kernels.reference import dequantize_weight
from engine.linears import kept_fp8
from engine.model.dit import MiniMaxH3Transformer
from engine.quant import Fp8Linear, whole_groups
from engine.schemes import Fp8Rowwise
from engine.types import LoadEvent
from tests.allocator import LiveBytes
from tests.released import (
    fp8_scaled,
    original_state,
    pruned,
    released_state,
    write_sharded,
    write_single,
)
from tests.tiny import block_config, tiny_config, unpacked_model
from tests.tolerances import CURVE_RATIO

pytestmark = pytest.mark.cpu

CONFIG = tiny_config()
MODEL = unpacked_model(CONFIG)
CPU = torch.device("cpu")
PREFIX = "model.diffusion_model."


def diffusers_shards(folder: Path) -> Path:
    return write_sharded(folder, released_state(MODEL), "diffusion_pytorch_model", 3)


def diffusers_file(folder: Path) -> Path:
    return write_single(folder / "any-name.safetensors", released_state(MODEL))


def original_shards(folder: Path) -> Path:
    return write_sharded(folder, original_state(MODEL, CONFIG), "model", 3)


def shards_without_index(folder: Path) -> Path:
    original_shards(folder)
    next(folder.glob("*.index.json")).unlink()
    return folder


def single_file(folder: Path) -> Path:
    return write_single(folder / "x.safetensors", original_state(MODEL, CONFIG, "stacked"), PREFIX)


WHOLE = [diffusers_shards, diffusers_file, original_shards, shards_without_index, single_file]


def _load(source: Source, **options: object) -> MiniMaxH3Transformer:
    return load_model(source, dtype=torch.bfloat16, device=CPU, **options)


@pytest.mark.parametrize("write", WHOLE, ids=lambda write: write.__name__)
def test_every_layout_gives_the_same_bits(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    loaded, expected = _load(open_source(write(tmp_path), CONFIG)), released_state(MODEL)
    state = loaded.state_dict()
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert state[name].dtype == tensor.dtype, name
        assert torch.equal(state[name], tensor), name


def test_the_order_of_fused_projections_can_be_given(tmp_path: Path) -> None:
    merged = write_single(tmp_path / "merged.safetensors", original_state(MODEL, CONFIG))
    loaded = _load(open_source(merged, CONFIG, qkv="interleaved"))
    name = "transformer_blocks.1.attn.to_k.weight"
    assert torch.equal(loaded.get_parameter(name), released_state(MODEL)[name])


def test_what_files_do_not_tell_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        open_source(original_shards(tmp_path), CONFIG)
    text = caplog.text
    assert "original layout, interleaved qkv, 3 files" in text
    assert "qkv_assumed interleaved" in text
    caplog.clear()
    open_source(single_file(tmp_path), CONFIG)
    assert "qkv_assumed stacked" in caplog.text
    assert "weights_assumed FL2VA" in text


# Pruned: modulation from a table.


def _pruned(folder: Path, points: int = 33, rank: int = 48) -> Path:
    tensors = pruned(MODEL, original_state(MODEL, CONFIG, "stacked"), points, rank)
    return write_single(folder / "pruned.safetensors", tensors)


def test_a_pruned_file_modulates_like_the_whole_one(tmp_path: Path) -> None:
    loaded = _load(open_source(_pruned(tmp_path), CONFIG))
    whole = _load(open_source(single_file(tmp_path), CONFIG))
    times = torch.tensor([0.0, 0.25, 0.5, 1.0])  # points of the table, so nothing is interpolated
    got, expected = (model.modulation(1, model.time_embedding(times)) for model in (loaded, whole))
    assert got.dtype == expected.dtype == torch.bfloat16
    assert (got - expected).norm() <= CURVE_RATIO * expected.norm()
    got, expected = (
        model.final_modulation(model.time_embedding(times)) for model in (loaded, whole)
    )
    assert (got - expected).norm() <= CURVE_RATIO * expected.norm()


def test_times_between_points_are_interpolated(tmp_path: Path) -> None:
    curve = _load(open_source(_pruned(tmp_path, points=5), CONFIG)).time_embedder
    low, high = curve.table[2], curve.table[3]
    got = curve(torch.tensor([0.5625, -1.0, 1.0, 7.0]))
    torch.testing.assert_close(got[0], 0.75 * low + 0.25 * high)
    assert torch.equal(got[1], curve.table[0])
    assert torch.equal(got[2], curve.table[4])
    assert torch.equal(got[3], curve.table[4])


def test_a_pruned_model_makes_chunks_with_its_modulation_freed(tmp_path: Path) -> None:
    from engine.core import RolloutCore
    from tests.tiny import chunk_noise, random_prefix, walk_views

    core = RolloutCore(_load(open_source(_pruned(tmp_path), CONFIG)))
    kept = core.begin(random_prefix(CONFIG))
    noise = chunk_noise(CONFIG, 0)
    made = core.denoise(kept, noise[0], noise[1:], walk_views(CONFIG, 1))
    core.free_adaln()
    freed = core.begin(random_prefix(CONFIG))
    assert torch.equal(core.denoise(freed, noise[0], noise[1:], walk_views(CONFIG, 1)), made)


def test_another_reduction_of_the_modulation_is_refused(tmp_path: Path) -> None:
    tensors = original_state(MODEL, CONFIG) | {"adaln_basis": torch.zeros(16, 48)}
    with pytest.raises(UnsupportedError, match=r"x\.safetensors: tensor adaln_basis"):
        open_source(write_single(tmp_path / "x.safetensors", tensors), CONFIG)


# Eight bits.


def _fp8(folder: Path) -> Path:
    tensors = fp8_scaled(original_state(MODEL, CONFIG, "stacked"))
    return write_single(folder / "fp8.safetensors", tensors)


def test_scaled_eight_bits_are_multiplied_out(tmp_path: Path) -> None:
    loaded = _load(open_source(_fp8(tmp_path), CONFIG))
    stored = load_file(tmp_path / "fp8.safetensors")
    stem = "blocks.2.mlp.fc1"
    wide = stored[f"{stem}.weight"].float() * stored[f"{stem}.weight_scale"]
    gate, value = wide.bfloat16().chunk(2)
    assert torch.equal(loaded.block(2).ff.net[0].proj.weight, torch.cat([value, gate]))


def test_scaled_eight_bits_can_stay(tmp_path: Path) -> None:
    source = open_source(_fp8(tmp_path), CONFIG)
    assert source.fp8_factors == dict.fromkeys(source.fp8_factors, 1)
    assert len(source.fp8_factors) == 3 * 6
    rule = Fp8Rowwise(blocks=(2, 2))
    kept = _load(source, fp8_weights=whole_groups(lambda name, _: True, (rule,), 3))
    wide = _load(source)
    linear = kept.block(2).attn.to_k
    assert isinstance(linear, Fp8Linear)
    restored = linear.codes_NK.float() * linear.scale[:, None]
    assert torch.equal(restored.bfloat16(), wide.block(2).attn.to_k.weight)
    assert torch.equal(kept.block(1).attn.to_k.weight, wide.block(1).attn.to_k.weight)


def test_one_factor_a_tensor_is_that_of_every_block(tmp_path: Path) -> None:
    config = block_config(num_layers=6)
    tensors = fp8_scaled(original_state(unpacked_model(config), config, "stacked"))
    tensors["blocks.2.attn.out_proj.weight_scale"] = torch.rand(128) + 0.5
    source = open_source(write_single(tmp_path / "fp8.safetensors", tensors), config)
    asked = EngineConfig(device="cpu", dtype="bfloat16", linear="fp8_block")
    names = kept_fp8(source, asked, None)
    assert "transformer_blocks.2.attn.to_out.0.weight" not in names  # has factors of rows
    assert len(names) == 5
    kept, wide = _load(source, fp8_weights=names), _load(source)
    linear = kept.block(2).attn.to_k
    assert isinstance(linear, Fp8Linear)
    assert linear.in_blocks
    restored = dequantize_weight(linear.codes_NK, linear.scale)
    assert torch.equal(restored.bfloat16(), wide.block(2).attn.to_k.weight)


@pytest.mark.parametrize("shards", [1, 3])
def test_a_pruned_file_may_be_in_eight_bits_and_in_shards(tmp_path: Path, shards: int) -> None:
    """As single files are repackaged, whose fused projections are stacked wherever they lie."""
    tensors = fp8_scaled(pruned(MODEL, original_state(MODEL, CONFIG, "stacked"), 33, 48))
    scales = [name for name in tensors if name.endswith(".weight_scale")]
    tensors |= {name.replace(".weight_", ".input_"): torch.tensor(0.5) for name in scales}
    write_sharded(tmp_path, {PREFIX + name: each for name, each in tensors.items()}, "x", shards)
    source = open_source(tmp_path, CONFIG)
    assert (source.qkv, len(source.files), len(source.fp8_factors)) == ("stacked", shards, 18)
    loaded, stem = _load(source), "blocks.1.attn.qkv_proj"
    wide = tensors[f"{stem}.weight"].float() * tensors[f"{stem}.weight_scale"]
    attention = loaded.block(1).attn
    got = torch.cat([attention.to_q.weight, attention.to_k.weight, attention.to_v.weight])
    assert torch.equal(got, wide.bfloat16())
    modulation = loaded.block(1).adaln_proj.linear.weight
    assert modulation.dtype == torch.float32
    assert torch.equal(modulation, tensors["blocks.1.adaln_proj.linear.weight"])


def test_eight_bits_without_whole_blocks_do_not_stay_in_blocks(tmp_path: Path) -> None:
    config = block_config(num_layers=6, ffn_dim=192)
    tensors = fp8_scaled(original_state(unpacked_model(config), config, "stacked"))
    source = open_source(write_single(tmp_path / "fp8.safetensors", tensors), config)
    names = {
        form: kept_fp8(source, EngineConfig(device="cpu", linear=form), None).keys()
        for form in ("fp8_rowwise", "fp8_block")
    }
    left_out = names["fp8_rowwise"] - names["fp8_block"]
    assert left_out == {"transformer_blocks.2.ff.net.2.weight"}


@pytest.mark.parametrize("shape", [[96], [96, 1]])
def test_factors_of_rows_are_taken_too(tmp_path: Path, shape: list[int]) -> None:
    tensors = fp8_scaled(original_state(MODEL, CONFIG, "stacked"))
    scale = torch.rand(shape) + 0.5
    tensors["blocks.0.mlp.fc2.weight_scale"] = scale
    loaded = _load(open_source(write_single(tmp_path / "x.safetensors", tensors), CONFIG))
    expected = tensors["blocks.0.mlp.fc2.weight"].float() * scale.reshape(-1, 1)
    assert torch.equal(loaded.block(0).ff.net[2].weight, expected.bfloat16())


def test_a_format_that_is_not_served_is_named(tmp_path: Path) -> None:
    tensors = original_state(MODEL, CONFIG, "stacked")
    stem = "blocks.0.mlp.fc2"
    tensors[f"{stem}.weight"] = torch.zeros(96, 160, dtype=torch.int8)
    tensors[f"{stem}.weight_scale"] = torch.ones(96)
    text = json.dumps({"format": "int8_tensorwise", "convrot": True}).encode()
    tensors[f"{stem}.comfy_quant"] = torch.tensor(list(text), dtype=torch.uint8)
    with pytest.raises(UnsupportedError, match=r"says 'int8_tensorwise'; allowed: 'float8_e4m3fn'"):
        open_source(write_single(tmp_path / "x.safetensors", tensors), CONFIG)


# Where the transformer is, and which configuration it has.


def test_other_files_of_the_folder_are_left_alone(tmp_path: Path) -> None:
    single_file(tmp_path)
    write_single(tmp_path / "vae.safetensors", {"decoder.conv.weight": torch.zeros(3)})
    lora = {"transformer_blocks.0.attn.to_q.lora_A.weight": torch.zeros(4, 96)}
    write_single(tmp_path / "lora.safetensors", lora)
    assert open_source(tmp_path, CONFIG).files == (tmp_path / "x.safetensors",)


def test_two_models_in_a_folder_are_refused(tmp_path: Path) -> None:
    write_single(tmp_path / "a.safetensors", original_state(MODEL, CONFIG, "stacked"))
    write_single(tmp_path / "b.safetensors", original_state(MODEL, CONFIG, "stacked"))
    with pytest.raises(CheckpointError, match=r"b\.safetensors: tensor \S+ is in a\.safetensors"):
        open_source(tmp_path, CONFIG)


def test_a_folder_without_a_transformer_says_what_was_expected(tmp_path: Path) -> None:
    write_single(tmp_path / "vae.safetensors", {"decoder.conv.weight": torch.zeros(3)})
    with pytest.raises(
        CheckpointError, match=r"holds no transformer of 3 blocks; expected tensors such as"
    ):
        open_source(tmp_path, CONFIG)


def test_a_configuration_of_another_tool_has_to_agree(tmp_path: Path) -> None:
    assert read_config(tmp_path, CONFIG) == CONFIG
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"_class_name": "X", "num_layers": 3, "patch_size": [1, 2, 2]}))
    assert read_config(tmp_path, CONFIG) == CONFIG
    path.write_text(json.dumps({"token_refiner_num_layers": 2}))
    with pytest.raises(CheckpointError, match="token_refiner_num_layers: expected 1, got 2"):
        read_config(tmp_path, CONFIG)


def test_two_models_of_one_kind_have_two_hashes(tmp_path: Path) -> None:
    first, second = (
        sampled_hash(open_source(write_single(tmp_path / name, tensors), CONFIG))
        for name, tensors in (
            ("a.safetensors", released_state(MODEL)),
            ("b.safetensors", released_state(unpacked_model(CONFIG, seed=1))),
        )
    )
    assert first != second


def test_an_engine_loads_released_weights_by_its_preset(tmp_path: Path) -> None:
    events: list[LoadEvent] = []
    folder = original_shards(tmp_path / "transformer")
    with pytest.raises(CheckpointError, match="has no text encoder"):
        Engine.from_pretrained(
            folder, EngineConfig(device="cpu", dtype="bfloat16"), model_config=CONFIG,
            on_progress=events.append,
        )  # fmt: skip


# Progress and memory.


def test_progress_ends_at_the_whole(tmp_path: Path) -> None:
    events: list[LoadEvent] = []
    source = open_source(original_shards(tmp_path), CONFIG)
    _load(source, on_progress=events.append)
    assert events[-1].done_bytes == events[-1].total_bytes == source.nbytes
    assert events[-1].share == 1.0
    text = str(LoadEvent(done_bytes=12 * 10**9, total_bytes=66 * 10**9, elapsed_s=3.0))
    assert text == "12.0 of 66.0 GB, 4.0 GB/s, 14 s left"


def test_factors_of_rows_count_as_well() -> None:
    events: list[LoadEvent] = []
    config = EngineConfig(device="cpu", dtype="float32")
    Engine.from_pretrained("mini", config, on_progress=events.append).close()
    assert events[-1].done_bytes == events[-1].total_bytes


@pytest.mark.parametrize("write", [diffusers_shards, original_shards])
def test_no_second_copy_of_the_weights_is_made(
    tmp_path: Path, write: Callable[[Path], Path]
) -> None:
    source = open_source(write(tmp_path), CONFIG)
    largest = max(piece.record.nbytes for piece in source.pieces)
    with LiveBytes() as live:
        _load(source)
    assert live.peak_bytes <= source.nbytes + 3 * largest


class _Event:
    """Stands for the end of a copy: a buffer may be filled again once it was waited for."""

    def __init__(self) -> None:
        self._is_free = True

    def synchronize(self) -> None:
        self._is_free = True

    def record(self, stream: object) -> None:
        assert self._is_free
        self._is_free = False


@pytest.mark.parametrize("buffer_bytes", [1000, 4096, 10**6])
def test_tensors_go_through_two_buffers_piece_by_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, buffer_bytes: int
) -> None:
    monkeypatch.setattr(reading, "BUFFER_BYTES", buffer_bytes)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    reader = TensorReader(CPU)
    buffers = [torch.empty(buffer_bytes, dtype=torch.uint8) for _ in range(2)]
    reader._buffers = [(buffer, _Event()) for buffer in buffers]
    expected = original_state(MODEL, CONFIG)
    for piece in open_source(original_shards(tmp_path), CONFIG).pieces:
        sent = reader._send(piece.record).view(expected[piece.name].dtype)
        assert torch.equal(sent.view(piece.record.shape), expected[piece.name]), piece.name


# What can be wrong: file, tensor, expected and got, before anything is allocated.


def _change(path: Path, name: str, tensor: Tensor | None) -> None:
    """Change or drop a tensor of whichever shard has it."""
    for file in path.glob("*.safetensors"):
        tensors = load_file(file)
        if name in tensors:
            del tensors[name]
            if tensor is not None:
                tensors[name] = tensor
            save_file(tensors, file)


def _cut(path: Path, count: int) -> Path:
    file = max(path.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-count])
    return file


def test_a_truncated_shard_is_named_with_its_tensor(tmp_path: Path) -> None:
    file = _cut(original_shards(tmp_path), 10)
    with pytest.raises(
        CheckpointError, match=rf"{file.name} is truncated .* tensor \S+: expected bytes \d+ to \d+"
    ):
        open_source(tmp_path, CONFIG)


def test_an_index_that_names_a_missing_file_is_refused(tmp_path: Path) -> None:
    file = max(original_shards(tmp_path).glob("*.safetensors"))
    file.unlink()
    with pytest.raises(
        CheckpointError,
        match=rf"{file.name} is missing; model\.safetensors\.index\.json lists it, one of 3 shards",
    ):
        open_source(tmp_path, CONFIG)


def test_a_tensor_that_the_index_puts_elsewhere_is_named(tmp_path: Path) -> None:
    _change(original_shards(tmp_path), "blocks.1.mlp.fc2.weight", None)
    with pytest.raises(CheckpointError, match=r"tensor blocks\.1\.mlp\.fc2\.weight is missing;"):
        open_source(tmp_path, CONFIG)


def test_a_missing_shard_without_an_index_is_noticed(tmp_path: Path) -> None:
    min(shards_without_index(tmp_path).glob("*.safetensors")).unlink()
    with pytest.raises(CheckpointError, match=r"\d+ tensors are missing, first \S+; expected \d+"):
        open_source(tmp_path, CONFIG)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("blocks.0.attn.qkv_proj.weight", torch.zeros(4, 96).bfloat16(),
         r"expected \[768, 96\], got \[4, 96\]"),
        ("blocks.0.mlp.fc2.weight", torch.zeros(96, 160, dtype=torch.int32),
         "wrong dtype: expected F32 or BF16 or F16, got I32"),
        ("final_layer.video_out.bias", torch.zeros(96).bfloat16(),
         "wrong dtype: expected F32, got BF16"),
        ("blocks.0.mlp.fc2.weight", torch.zeros(96, 160).to(torch.float8_e4m3fn),
         r"is F8_E4M3; expected blocks\.0\.mlp\.fc2\.weight_scale beside it"),
    ],
    ids=["shape", "dtype", "island", "fp8"],
)  # fmt: skip
def test_a_wrong_tensor_is_named(tmp_path: Path, name: str, tensor: Tensor, message: str) -> None:
    _change(original_shards(tmp_path), name, tensor)
    with pytest.raises(CheckpointError, match=rf"model-\S+: tensor {name} .*{message}"):
        open_source(tmp_path, CONFIG)


def test_mixed_layouts_are_refused(tmp_path: Path) -> None:
    tensors = original_state(MODEL, CONFIG)
    tensors["transformer_blocks.0.norm1.weight"] = tensors.pop("blocks.0.norm1.weight")
    with pytest.raises(CheckpointError, match="expected one layout, got mixed ones"):
        open_source(write_single(tmp_path / "x.safetensors", tensors), CONFIG)


def test_a_pickle_under_another_name_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for data in (pickle.dumps({"blocks": 1}), None):
        if data is None:
            torch.save({"blocks": torch.zeros(2)}, path)
        else:
            path.write_bytes(data)
        with pytest.raises(
            CheckpointError, match=r"model\.safetensors is a pickle; expected safet"
        ):
            open_source(tmp_path, CONFIG)


@pytest.mark.parametrize("length", [0x280, 0x380, 0x480])
def test_a_header_may_be_as_long_as_a_pickle_begins(tmp_path: Path, length: int) -> None:
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    header = json.dumps({"a": entry}).ljust(length).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + header + bytes(8))
    assert read_shard(path).records["a"].start == 8 + length


def test_a_folder_of_pickles_is_refused(tmp_path: Path) -> None:
    torch.save({"blocks": torch.zeros(2)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"got pytorch_model\.bin, which is a pickle"):
        open_source(tmp_path, CONFIG)


@pytest.mark.parametrize("text", ["[]", '{"weight_map": 3}', "{"])
def test_a_broken_index_is_named(tmp_path: Path, text: str) -> None:
    next(original_shards(tmp_path).glob("*.index.json")).write_text(text)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json is not an index"):
        open_source(tmp_path, CONFIG)


def test_an_index_may_not_leave_its_folder(tmp_path: Path) -> None:
    text = json.dumps({"weight_map": {"a": "../x.safetensors"}})
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"names \.\./x\.safetensors; expected files of its"):
        open_source(tmp_path, CONFIG)
