"""Adapters on disk: every writer's keys give the same factors, and each fault is named."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.checkpoint.adapters import Adapter, open_adapter
from engine.errors import CheckpointError, UnsupportedError
from engine.model.adaln_curve import CurveShape
from tests.adapters import (
    adapted_names,
    fused_factors,
    peft_keys,
    random_factors,
    write_adapter,
)
from tests.tiny import tiny_config, unpacked_model

pytestmark = pytest.mark.cpu

CONFIG = tiny_config()
MODEL = unpacked_model(CONFIG)
NAMES = adapted_names(CONFIG)
CPU = torch.device("cpu")


def _shared() -> dict[str, tuple[Tensor, Tensor]]:
    """Factors in which queries, keys and values share their A, as fused ones do."""
    factors = random_factors(MODEL, NAMES)
    return {
        name: (factors[name.replace("to_k", "to_q").replace("to_v", "to_q")][0], b)
        for name, (_, b) in factors.items()
    }


FACTORS = _shared()


def _peft(tmp: Path) -> Path:
    return write_adapter(tmp / "a.safetensors", peft_keys(FACTORS))


def _diffusers(tmp: Path) -> Path:
    return write_adapter(tmp / "a.safetensors", peft_keys(FACTORS, "transformer."))


def _reference(tmp: Path) -> Path:
    return write_adapter(tmp / "a.safetensors", peft_keys(FACTORS, "transformer_ref."))


def _raw_peft(tmp: Path) -> Path:
    prefix, infix = "base_model.model._fsdp_wrapped_module.", ".default"
    tensors = peft_keys(FACTORS, prefix, infix)
    tensors = {
        name.replace(".attn.", "._checkpoint_wrapped_module.attn."): tensor
        for name, tensor in tensors.items()
    }
    return write_adapter(tmp / "adapter_model_ema.safetensors", tensors).parent


def _pickled(tmp: Path) -> Path:
    shadow = peft_keys(FACTORS, "base_model.model.")
    torch.save({"schema": "solarwm.minimax-h3-ema.v1", "shadow": shadow}, tmp / "ema.pt")
    return tmp


def _stacked(tmp: Path) -> Path:
    tensors = peft_keys(fused_factors(FACTORS, CONFIG, "stacked"), "diffusion_model.")
    return write_adapter(tmp / "a.safetensors", tensors)


def _interleaved(tmp: Path) -> Path:
    tensors = peft_keys(fused_factors(FACTORS, CONFIG, "interleaved"), "", ".default")
    return write_adapter(tmp / "a.safetensors", tensors)


def _kohya(tmp: Path) -> Path:
    tensors = {}
    for name, (a, b) in fused_factors(FACTORS, CONFIG, "stacked").items():
        stem = "lora_unet_" + name.replace(".", "_")
        tensors |= {f"{stem}.lora_down.weight": a, f"{stem}.lora_up.weight": b}
        tensors[f"{stem}.alpha"] = torch.tensor(float(a.shape[0]))
    return write_adapter(tmp / "a.safetensors", tensors)


WRITERS = [_peft, _diffusers, _reference, _raw_peft, _pickled, _stacked, _interleaved, _kohya]


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__.strip("_"))
def test_every_writer_gives_the_same_factors(tmp_path: Path, write) -> None:
    adapter = open_adapter(write(tmp_path), CONFIG)
    assert sorted(adapter.pairs) == sorted(NAMES)
    for name, (a, b) in FACTORS.items():
        found = adapter.factors(name, CPU)
        assert torch.equal(found.a_RK, a), name
        assert torch.equal(found.b_NR, b), name
        assert found.scale == 1.0
    assert adapter.parameter_count == sum(a.numel() + b.numel() for a, b in FACTORS.values())


def test_the_update_is_a_product_in_fp32(tmp_path: Path) -> None:
    adapter = open_adapter(_peft(tmp_path), CONFIG)
    a, b = FACTORS[NAMES[3]]
    assert torch.equal(adapter.delta(NAMES[3], CPU), b.float() @ a.float())
    assert adapter.delta("proj_in", CPU) is None


def test_time_dependent_weights_can_be_adapted(tmp_path: Path) -> None:
    names = ["blocks.0.adaln_proj.linear", "final_layer.adaln_proj.linear"]
    sizes = [18 * 96, 2 * 96]
    factors = {
        n: (torch.randn(4, 48), torch.randn(s, 4)) for n, s in zip(names, sizes, strict=True)
    }
    adapter = open_adapter(write_adapter(tmp_path / "a.safetensors", peft_keys(factors)), CONFIG)
    assert sorted(adapter.pairs) == ["norm_out.linear", "transformer_blocks.0.adaln_proj.linear"]
    with pytest.raises(CheckpointError, match=r"lora_A\.weight has a wrong shape: .*\[rank, 8\]"):
        open_adapter(tmp_path / "a.safetensors", CONFIG, CurveShape(points=9, width=8))


def test_whole_changes_are_added_or_put_in_place(tmp_path: Path) -> None:
    tensors = peft_keys(dict(list(FACTORS.items())[:1])) | {
        "transformer_blocks.0.norm1.diff": torch.full((96,), 2.0),
        "norm_out.linear.diff_b": torch.full((192,), 3.0),
        "transformer_blocks.1.norm1.set_weight": torch.full((96,), 4.0),
        "transformer_blocks.1.attn.to_gate_compress.set_weight": torch.zeros(256, 96),
    }
    adapter = open_adapter(write_adapter(tmp_path / "a.safetensors", tensors), CONFIG)
    old = torch.ones(96).bfloat16()
    assert (adapter.changed("transformer_blocks.0.norm1.weight", old) == 3.0).all()
    assert (adapter.changed("transformer_blocks.1.norm1.weight", old) == 4.0).all()
    assert (adapter.changed("norm_out.linear.bias", torch.zeros(192)) == 3.0).all()
    assert len(adapter.changes) == 3


def test_gates_of_a_sparse_attention_are_left_out(tmp_path, caplog) -> None:
    tensors = peft_keys(dict(list(FACTORS.items())[:1]))
    tensors["transformer_blocks.1.attn.to_gate_compress.set_weight"] = torch.zeros(256, 96)
    with caplog.at_level(logging.WARNING):
        open_adapter(write_adapter(tmp_path / "a.safetensors", tensors), CONFIG)
    assert "adapter_part_unused tensors=1" in caplog.text


@pytest.mark.parametrize(
    ("metadata", "beside", "scale"),
    [
        ({"lora_alpha": "4"}, None, 0.5),
        ({"ss_network_alpha": "16"}, None, 2.0),
        ({"lora_adapter_metadata": json.dumps({"transformer.lora_alpha": 2})}, None, 0.25),
        (None, {"r": 8, "lora_alpha": 16}, 2.0),
        (None, {"r": 8, "lora_alpha": 8, "use_rslora": True}, 8**0.5),
    ],
    ids=["metadata", "network", "diffusers", "beside", "stabilised"],
)
def test_alpha_is_found_where_it_is_written(tmp_path, metadata, beside, scale) -> None:
    file = write_adapter(tmp_path / "a.safetensors", peft_keys(FACTORS), metadata)
    if beside is not None:
        (tmp_path / "adapter_config.json").write_text(json.dumps(beside))
    assert list(open_adapter(file, CONFIG).scales) == [pytest.approx(scale)]


def test_the_hash_follows_the_content(tmp_path: Path) -> None:
    first = open_adapter(_peft(tmp_path), CONFIG).content_hash
    assert open_adapter(_peft(tmp_path), CONFIG).content_hash == first
    tensors = peft_keys(FACTORS)
    next(iter(tensors.values()))[0, 0] += 1.0
    changed = write_adapter(tmp_path / "b.safetensors", tensors)
    next(iter(tensors.values()))[0, 0] -= 1.0
    assert open_adapter(changed, CONFIG).content_hash != first
    (tmp_path / "adapter_config.json").write_text(json.dumps({"lora_alpha": 2}))
    assert open_adapter(_peft(tmp_path), CONFIG).content_hash != first


# What can be wrong.

Q = "transformer_blocks.0.attn.to_q"
GOOD = {f"{Q}.lora_A.weight": torch.zeros(8, 96), f"{Q}.lora_B.weight": torch.zeros(256, 8)}
BAD = {
    "width": ({f"{Q}.lora_A.weight": torch.zeros(8, 95)},
              rf"a\.safetensors: tensor {Q}\.lora_A\.weight has a wrong shape: expected "
              rf"\[rank, 96\] for {Q}, got \[8, 95\]"),
    "outputs": ({f"{Q}.lora_B.weight": torch.zeros(192, 8)}, r"expected \[256, 8\] for"),
    "ranks": ({f"{Q}.lora_B.weight": torch.zeros(256, 4)}, r"expected \[256, 8\] for"),
    "dtype": ({f"{Q}.lora_B.weight": torch.zeros(256, 8, dtype=torch.int8)},
              "wrong dtype: expected F32 or BF16 or F16, got I8"),
    "layer": ({"transformer_blocks.9.attn.to_q.lora_A.weight": torch.zeros(8, 96)},
              r"unknown tensor transformer_blocks\.9\.attn\.to_q\.lora_A\.weight; expected lin"),
    "key": ({f"{Q}.hada_w1": torch.zeros(8, 96)}, r"unknown tensor .*hada_w1; expected names that"),
    "partner": ({"norm_out.linear.lora_A.weight": torch.zeros(8, 48)}, "has no partner"),
    "mixed": ({"blocks.1.mlp.fc2.lora_A.weight": torch.zeros(8, 160),
               "blocks.1.mlp.fc2.lora_B.weight": torch.zeros(96, 8)}, "got mixed ones"),
    "twice": ({f"{Q}.lora_down.weight": torch.zeros(8, 96)}, "are the same factor"),
    "diff": ({"norm_out.norm.diff": torch.zeros(95)}, r"expected \[96\] for norm_out.norm.weight"),
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD)
def test_a_wrong_adapter_is_named(tmp_path: Path, bad: str) -> None:
    changes, message = BAD[bad]
    file = write_adapter(tmp_path / "a.safetensors", GOOD | changes)
    with pytest.raises(CheckpointError, match=message):
        open_adapter(file, CONFIG)


def test_an_adapter_of_the_large_model_is_refused(tmp_path: Path) -> None:
    tensors = {
        f"{Q}.lora_A.weight": torch.zeros(2, 5376),
        f"{Q}.lora_B.weight": torch.zeros(7168, 2),
    }
    file = write_adapter(tmp_path / "a.safetensors", tensors)
    with pytest.raises(CheckpointError, match=r"expected \[rank, 96\] .* got \[2, 5376\]"):
        open_adapter(file, CONFIG)


def test_other_decompositions_are_refused(tmp_path: Path) -> None:
    tensors = GOOD | {f"{Q}.lora_magnitude_vector.weight": torch.zeros(256)}
    with pytest.raises(UnsupportedError, match="is of DoRA"):
        open_adapter(write_adapter(tmp_path / "a.safetensors", tensors), CONFIG)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"alpha_pattern": {"q": 2}}))
    with pytest.raises(UnsupportedError, match="alpha_pattern is"):
        open_adapter(write_adapter(tmp_path / "a.safetensors", GOOD), CONFIG)


class _Code:
    def __reduce__(self):
        return print, ("code ran",)


def test_a_pickle_with_code_is_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"shadow": {"a": _Code()}}, tmp_path / "ema.pt")
    with pytest.raises(CheckpointError, match=r"ema\.pt is no file of tensors alone"):
        open_adapter(tmp_path, CONFIG)
    assert capsys.readouterr().out == ""


def test_an_alpha_that_is_no_number_is_refused(tmp_path: Path) -> None:
    file = write_adapter(tmp_path / "a.safetensors", GOOD, {"alpha": "much"})
    with pytest.raises(CheckpointError, match="alpha is 'much'; expected a number"):
        open_adapter(file, CONFIG)


def test_a_pickle_as_safetensors_is_refused(tmp_path: Path) -> None:
    torch.save(GOOD, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match="is a pickle; expected safetensors"):
        open_adapter(tmp_path / "a.safetensors", CONFIG)


@pytest.mark.parametrize(
    ("name", "message"), [("a.bin", "is .bin; expected"), ("no.pt", "missing")]
)
def test_other_files_are_refused(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "a.bin").touch()
    with pytest.raises(CheckpointError, match=message):
        open_adapter(tmp_path / name, CONFIG)


def test_a_folder_without_an_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no adapter; expected one of"):
        open_adapter(tmp_path, CONFIG)


def test_a_file_without_factors_is_refused(tmp_path: Path) -> None:
    gate = {"transformer_blocks.0.attn.to_gate_compress.set_weight": torch.zeros(2, 2)}
    adapter: Adapter | None = None
    with pytest.raises(CheckpointError, match="has no factors"):
        adapter = open_adapter(write_adapter(tmp_path / "a.safetensors", gate), CONFIG)
    assert adapter is None
