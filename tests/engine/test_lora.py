"""Adapters in a model: three modes, eight bits beside them, what a merge loses, what is kept."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine import loading
from engine.checkpoint.adapters import Adapter, open_adapter
from engine.checkpoint.folder import save_model
from engine.checkpoint.shards import write_shard
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import CheckpointError, ConfigError, UnsupportedError
from engine.kernels.reference import quantize_rows
from engine.lora import adapter_report, change_weights, install_adapter, resolve_mode
from engine.model.dit import MiniMaxH3Transformer
from engine.model.lora_linear import LoraLinear
from engine.quant import Fp8Linear
from engine.text import WordEncoder
from tests.adapters import adapted_names, peft_keys, random_factors, write_adapter
from tests.engine.kernels.test_ops import run_interpreted
from tests.released import fp8_scaled, original_state, released_state, write_single
from tests.tiny import block_config, random_action, random_anchor, tiny_config, unpacked_model
from tests.tolerances import FP32_ROLLOUT_ATOL

pytestmark = pytest.mark.cpu

CONFIG = tiny_config()
CPU = torch.device("cpu")
NAME = "transformer_blocks.1.attn.to_k"
BF16 = EngineConfig(device="cpu", dtype="bfloat16")


def _bf16_model() -> MiniMaxH3Transformer:
    model = unpacked_model(CONFIG)
    model.cast_blocks(torch.bfloat16)
    return model


FACTORS = random_factors(unpacked_model(CONFIG), adapted_names(CONFIG))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapter.safetensors", peft_keys(FACTORS))


@pytest.fixture
def adapter(file: Path) -> Adapter:
    return open_adapter(file, CONFIG)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    words = WordEncoder.of(CONFIG)
    save_model(tmp_path / "w", unpacked_model(CONFIG), CONFIG, text_encoder=words, int8=False)
    return tmp_path / "w"


def test_merged_weights_are_summed_in_fp32_and_rounded_once(adapter: Adapter) -> None:
    model, before = _bf16_model(), _bf16_model()
    install_adapter(model, adapter, "merged")
    for name, (a, b) in FACTORS.items():
        weight = before.get_parameter(f"{name}.weight")
        expected = (weight.float() + b.float() @ a.float()).bfloat16()
        assert torch.equal(model.get_parameter(f"{name}.weight"), expected), name


@pytest.mark.parametrize("mode", ["separate", "fused"])
def test_a_branch_is_three_rounded_products(adapter: Adapter, mode: str) -> None:
    model = _bf16_model()
    install_adapter(model, adapter, mode)
    linear, (a, b) = model.get_submodule(NAME), FACTORS[NAME]
    assert isinstance(linear, LoraLinear)
    x = torch.randn(1, 5, 96).bfloat16()
    expected = F.linear(x, linear.weight) + F.linear(F.linear(x, a), b)
    assert torch.equal(linear(x), expected)


def test_a_scale_multiplies_the_branch(tmp_path: Path) -> None:
    file = write_adapter(tmp_path / "a.safetensors", peft_keys(FACTORS), {"lora_alpha": "4"})
    model = _bf16_model()
    install_adapter(model, open_adapter(file, CONFIG), "separate")
    linear, (a, b) = model.get_submodule(NAME), FACTORS[NAME]
    assert isinstance(linear, LoraLinear)
    x = torch.randn(1, 5, 96).bfloat16()
    expected = F.linear(x, linear.weight) + F.linear(F.linear(x, a), b) * 0.5
    assert torch.equal(linear(x), expected)


def test_whole_changes_are_applied_in_every_mode(tmp_path: Path) -> None:
    tensors = peft_keys(FACTORS) | {"norm_out.norm.diff": torch.full((96,), 0.5)}
    adapter = open_adapter(write_adapter(tmp_path / "a.safetensors", tensors), CONFIG)
    model, before = _bf16_model(), _bf16_model()
    change_weights(model, adapter)
    expected = (before.norm_out.norm.weight.float() + 0.5).bfloat16()
    assert torch.equal(model.norm_out.norm.weight, expected)


def test_freed_modulation_keeps_its_branch(tmp_path: Path) -> None:
    name = "transformer_blocks.0.adaln_proj.linear"
    factors = random_factors(unpacked_model(CONFIG), [name])
    file = write_adapter(tmp_path / "a.safetensors", peft_keys(factors))
    made = []
    for free_adaln in (False, True):
        config = dataclasses.replace(BF16, lora=str(file), free_adaln=free_adaln)
        made.append(_roll(Engine.from_random(CONFIG, config)))
    assert torch.equal(*made)


# Modes of an engine.


def _roll(engine: Engine, chunks: int = 2) -> Tensor:
    rollout = engine.new_rollout("snow", anchor_BCTHW=random_anchor(CONFIG))
    made = [engine.step(rollout, random_action(i)).latents_BCTHW for i in range(chunks)]
    return torch.cat(made, dim=2)


def test_an_adapter_changes_what_is_made_and_its_hash(file: Path) -> None:
    plain = Engine.from_random(CONFIG, BF16)
    adapted = Engine.from_random(CONFIG, dataclasses.replace(BF16, lora=str(file)))
    assert adapted.config.lora_mode == "separate"
    assert adapted.model_hash != plain.model_hash
    assert not torch.equal(_roll(plain), _roll(adapted))


def test_in_fp32_merged_and_separate_agree(file: Path) -> None:
    config = EngineConfig(device="cpu", dtype="float32", lora=str(file))
    made = [
        _roll(Engine.from_random(CONFIG, dataclasses.replace(config, lora_mode=mode)))
        for mode in ("merged", "separate")
    ]
    torch.testing.assert_close(made[0], made[1], atol=FP32_ROLLOUT_ATOL, rtol=0.0)


EAGER = EngineConfig(device="cpu", dtype="bfloat16", linear="bf16", kernels="eager")
FP8 = EngineConfig(device="cpu", dtype="bfloat16", linear="fp8_rowwise", kernels="eager")


def test_auto_takes_the_best_that_loses_nothing(adapter: Adapter) -> None:
    assert resolve_mode(EAGER, adapter) == "fused"
    assert resolve_mode(EAGER, adapter, world_size=2) == "separate"
    assert resolve_mode(dataclasses.replace(EAGER, kernels="off"), adapter) == "separate"
    assert resolve_mode(FP8, adapter) == "merged"


@pytest.mark.parametrize(
    ("config", "mode", "world_size", "message"),
    [
        (FP8, "separate", 1, r"allowed here: 'merged', because linear is 'fp8_rowwise'"),
        (FP8, "fused", 1, r"allowed here: 'merged', because linear is 'fp8_rowwise'"),
        (EAGER, "fused", 2, r"'merged', 'separate', because 2 ranks share a rollout"),
        (dataclasses.replace(EAGER, kernels="off"), "fused", 1, "because kernels are 'off'"),
    ],
    ids=["separate-fp8", "fused-fp8", "ranks", "kernels"],
)
def test_modes_that_cannot_run_are_refused(adapter, config, mode, world_size, message) -> None:
    asked = dataclasses.replace(config, lora_mode=mode)
    with pytest.raises(UnsupportedError, match=message):
        resolve_mode(asked, adapter, world_size=world_size)


def test_kernels_add_without_a_scale(tmp_path: Path) -> None:
    file = write_adapter(tmp_path / "a.safetensors", peft_keys(FACTORS), {"lora_alpha": "4"})
    adapter = open_adapter(file, CONFIG)
    assert resolve_mode(EAGER, adapter) == "separate"
    with pytest.raises(UnsupportedError, match=r"scales are \[0\.5\]"):
        resolve_mode(dataclasses.replace(EAGER, lora_mode="fused"), adapter)


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match="lora_mode is 'both'; allowed: 'auto', 'merged'"):
        EngineConfig(lora_mode="both")


def test_an_adapter_is_checked_before_weights_are_read(folder: Path, tmp_path: Path) -> None:
    tensors = {
        f"{NAME}.lora_A.weight": torch.zeros(2, 5),
        f"{NAME}.lora_B.weight": torch.zeros(5, 2),
    }
    file = write_adapter(tmp_path / "a.safetensors", tensors)
    read: list[object] = []
    config = dataclasses.replace(BF16, lora=str(file))
    with pytest.raises(CheckpointError, match=r"a\.safetensors: tensor .* wrong shape"):
        Engine.from_pretrained(folder, config, on_progress=read.append)
    assert read == []


_FUSED = """
import dataclasses, json, tempfile, torch
from pathlib import Path
from engine.attention.placement import Placement, PlacementOps
from engine.block_ops import Slot
from engine.checkpoint.adapters import open_adapter
from engine.fused_ops import fused_block_ops
from engine.lora import install_adapter
from engine.model.prope import projective
from tests.adapters import SIX, adapted_names, peft_keys, random_factors, write_adapter
from tests.engine.kernels.interpreter import mend_interpreter
from tests.tiny import narrow_config, unpacked_model, walk_views

mend_interpreter()
bf16 = torch.bfloat16
config = dataclasses.replace(narrow_config(), hidden_size=32, ffn_dim=48)
camera = projective(walk_views(config, 1), bf16)
angles = torch.randn(10, 96)
placement = Placement(
    cos_RK=angles.cos().to(bf16), sin_RK=angles.sin().to(bf16), camera=camera, ops=PlacementOps()
)
x, modulation = torch.randn(1, 10, 32).to(bf16), torch.randn(1, 1, 6, 32).to(bf16)

@torch.no_grad()
def run(linears, rounding, sums_inside):
    model = unpacked_model(config)
    factors = random_factors(model, adapted_names(config, linears), size=0.5)
    model.cast_blocks(bf16)
    with tempfile.TemporaryDirectory() as folder:
        file = write_adapter(Path(folder) / "a.safetensors", peft_keys(factors))
        mode = "fused" if sums_inside else "separate"
        install_adapter(model, open_adapter(file, config), mode)
    ops = fused_block_ops(model, rounding)
    cache = [torch.zeros(1, 16, 1, 128, dtype=bf16) for _ in range(3)]
    slot = Slot(
        key_BRNK=cache[0][:, 4:14], value_BRNK=cache[1][:, 4:14],
        raw_BRNK=cache[2][:, :10, :, :96], placement=placement,
    )
    entered, *projected = ops.project(0, x, modulation)
    q = ops.place(0, *projected, slot)
    o = ops.output(0, q + cache[0][:, 4:14], placement)
    gated = ops.finish(0, entered, o, modulation)
    left, *following = ops.project(0, gated, modulation)
    next_q = ops.place(0, *following, slot)
    out = torch.cat([ops.settle(gated), left, next_q.flatten(2)], dim=-1)
    return torch.cat([each.flatten() for each in (*cache, q, out)])

same, made = {}, []
cases = {"all": SIX, "some": ("attn.to_q", "ff.net.2"), "one": ("attn.to_out.0",)}
for name, linears in cases.items():
    for rounding in ("eager", "fast") if name == "all" else ("eager",):
        made.append(run(linears, rounding, True))
        same[f"{name} {rounding}"] = torch.equal(made[-1], run(linears, rounding, False))
same["adapters matter"] = not any(torch.equal(made[-1], each) for each in made[:-1])
print(json.dumps(same))
"""


def test_sums_inside_the_kernels_are_the_same_bits() -> None:
    same = json.loads(run_interpreted(_FUSED))
    assert same == dict.fromkeys(same, True)
    assert len(same) == 5


# Eight bits.


@pytest.fixture
def scheme(tmp_path: Path) -> str:
    path = tmp_path / "scheme.json"
    path.write_text(json.dumps([{"format": "fp8_rowwise", "blocks": [0, 1]}]))
    return str(path)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(loading, "CACHE_FOLDER", tmp_path / "cache")
    return tmp_path / "cache" / "linears"


def test_eight_bits_are_made_of_the_fp32_sum(folder, file, scheme, cache) -> None:
    config = dataclasses.replace(BF16, linear=scheme, lora=str(file))
    engine = Engine.from_pretrained(folder, config)
    assert engine.config.lora_mode == "merged"
    linear, (a, b) = engine.core.model.get_submodule(NAME), FACTORS[NAME]
    assert isinstance(linear, Fp8Linear)
    weight = unpacked_model(CONFIG).get_parameter(f"{NAME}.weight").bfloat16().float()
    codes, scale = quantize_rows(weight + b.float() @ a.float())
    assert torch.equal(linear.codes_NK.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(linear.scale, scale[:, 0])


def test_the_second_start_reads_what_the_first_quantised(folder, file, scheme, cache) -> None:
    config = dataclasses.replace(BF16, linear=scheme, lora=str(file))
    events: list[list[int]] = [[], []]
    made = []
    for told in events:
        engine = Engine.from_pretrained(
            folder, config, on_progress=lambda event, told=told: told.append(event.total_bytes)
        )
        made.append(_roll(engine))
    assert torch.equal(*made)
    assert events[1][-1] < events[0][-1]
    (kept,) = cache.iterdir()
    assert kept.suffix == ".safetensors"


@pytest.mark.parametrize("linear", ["fp8_block", "fp8_mixed"])
def test_blocks_are_kept_bit_for_bit(tmp_path, cache, linear) -> None:
    config = block_config(num_layers=6)
    words = WordEncoder.of(config)
    save_model(tmp_path / "w", unpacked_model(config), config, text_encoder=words, int8=False)
    asked = dataclasses.replace(BF16, linear=linear)
    made = [Engine.from_pretrained(tmp_path / "w", asked).core.model for _ in range(2)]
    assert len(list(cache.iterdir())) == 1
    quantised, kept = (model.state_dict() for model in made)
    assert quantised.keys() == kept.keys()
    for name, tensor in quantised.items():
        assert torch.equal(tensor.view(torch.uint8), kept[name].view(torch.uint8)), name


def test_other_weights_and_other_adapters_have_other_files(folder, file, scheme, cache) -> None:
    config = dataclasses.replace(BF16, linear=scheme)
    Engine.from_pretrained(folder, config)
    Engine.from_pretrained(folder, dataclasses.replace(config, lora=str(file)))
    assert len(list(cache.iterdir())) == 2


def test_the_two_files_that_were_used_last_stay(folder, tmp_path, scheme, cache) -> None:
    config = dataclasses.replace(BF16, linear=scheme)
    names = list(FACTORS)
    cache.mkdir(parents=True)
    stale = cache / "x.safetensors.1.part"
    stale.touch()
    os.utime(stale, (0, 0))
    for index in range(3):
        file = write_adapter(
            tmp_path / f"{index}.safetensors", peft_keys({names[index]: FACTORS[names[index]]})
        )
        Engine.from_pretrained(folder, dataclasses.replace(config, lora=str(file)))
        for age, path in enumerate(sorted(cache.iterdir(), key=lambda each: -each.stat().st_mtime)):
            os.utime(path, (1e9 - age, 1e9 - age))
    assert len(list(cache.iterdir())) == 2
    assert not stale.exists()


def test_one_process_at_a_time_keeps_what_was_quantised(folder, scheme, cache, monkeypatch) -> None:
    written: list[Path] = []

    def write(path: Path, *rest: object) -> None:
        written.append(path)
        Engine.from_pretrained(folder, config)  # another rank, at the same time

    monkeypatch.setattr("engine.linears.write_shard", write)
    config = dataclasses.replace(BF16, linear=scheme)
    Engine.from_pretrained(folder, config)
    assert len(written) == 1
    assert list(cache.iterdir()) == []


def test_a_folder_that_takes_no_writes_still_serves(folder, scheme, cache, monkeypatch) -> None:
    def refused(*given: object, **options: object) -> None:
        raise PermissionError(30, "Read-only file system")

    config = dataclasses.replace(BF16, linear=scheme)
    first = _roll(Engine.from_pretrained(folder, config))
    monkeypatch.setattr(os, "utime", refused)
    monkeypatch.setattr(Path, "unlink", refused)
    monkeypatch.setattr(Path, "touch", refused)
    assert torch.equal(_roll(Engine.from_pretrained(folder, config)), first)
    (kept,) = cache.iterdir()
    kept.write_bytes(kept.read_bytes()[:-100])
    assert torch.equal(_roll(Engine.from_pretrained(folder, config)), first)


def test_a_file_that_another_process_removes_is_no_trouble(
    folder, scheme, cache, monkeypatch
) -> None:
    cache.mkdir(parents=True)
    (cache / "gone.part").symlink_to(cache / "nothing")  # listed, but not there any more
    (cache / "gone.safetensors").symlink_to(cache / "nothing")
    Engine.from_pretrained(folder, dataclasses.replace(BF16, linear=scheme))
    assert [each for each in cache.iterdir() if each.is_file()]


@pytest.mark.parametrize("is_random", [False, True], ids=["folder", "random"])
def test_a_scheme_for_other_blocks_is_refused_before_weights_are_there(
    folder, tmp_path, cache, monkeypatch, is_random
) -> None:
    scheme = tmp_path / "scheme.json"
    scheme.write_text(json.dumps([{"format": "fp8_rowwise", "blocks": [0, 99]}]))
    config = dataclasses.replace(BF16, linear=str(scheme))
    for name in ("load_model", "empty_model"):
        monkeypatch.setattr(loading, name, None)
    source, start = (CONFIG, Engine.from_random) if is_random else (folder, Engine.from_pretrained)
    with pytest.raises(ConfigError, match=r"blocks are \(0, 99\); allowed: 0 to"):
        start(source, config)


def test_a_damaged_file_is_made_again(folder, scheme, cache) -> None:
    config = dataclasses.replace(BF16, linear=scheme)
    first = _roll(Engine.from_pretrained(folder, config))
    (kept,) = cache.iterdir()
    size = kept.stat().st_size
    kept.write_bytes(kept.read_bytes()[:-100])
    assert torch.equal(_roll(Engine.from_pretrained(folder, config)), first)
    assert kept.stat().st_size == size


def test_interrupted_writing_leaves_no_half_file(tmp_path: Path) -> None:
    def tensors():
        yield torch.zeros(3)
        raise KeyboardInterrupt

    entries = {"a": (torch.float32, (3,)), "b": (torch.float32, (3,))}
    with pytest.raises(KeyboardInterrupt):
        write_shard(tmp_path / "x.safetensors", entries, tensors())
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_only_costs_the_file(folder, scheme, cache, monkeypatch, caplog) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("engine.linears.write_shard", refuse)
    engine = Engine.from_pretrained(folder, dataclasses.replace(BF16, linear=scheme))
    assert isinstance(engine.core.model.get_submodule(NAME), Fp8Linear)
    assert "quantized_not_kept" in caplog.text


def test_released_eight_bits_stay_unless_an_adapter_changes_them(
    tmp_path, file, scheme, cache
) -> None:
    model = unpacked_model(CONFIG)
    tensors = fp8_scaled(original_state(model, CONFIG, "stacked"))
    words = WordEncoder.of(CONFIG).state_dict()
    tensors |= {f"text_encoder.{name}": tensor for name, tensor in words.items()}
    weights = write_single(tmp_path / "fp8" / "x.safetensors", tensors)
    config = dataclasses.replace(BF16, linear=scheme)
    kept = Engine.from_pretrained(weights, config, model_config=CONFIG)
    linear = kept.core.model.get_submodule("transformer_blocks.1.ff.net.2")
    stored = tensors["blocks.1.mlp.fc2.weight"]
    assert torch.equal(linear.codes_NK.view(torch.uint8), stored.view(torch.uint8))
    assert not cache.exists()
    config = dataclasses.replace(config, lora=str(file))
    changed = Engine.from_pretrained(weights, config, model_config=CONFIG)
    linear = changed.core.model.get_submodule("transformer_blocks.1.ff.net.2")
    assert not torch.equal(linear.codes_NK.view(torch.uint8), stored.view(torch.uint8))


# What a bf16 merge loses.


def test_the_report_counts_what_a_merge_loses(tmp_path: Path) -> None:
    model = unpacked_model(CONFIG)
    weights = write_single(tmp_path / "w.safetensors", released_state(model))
    small, large = (
        write_adapter(
            tmp_path / f"{size}.safetensors",
            peft_keys(random_factors(model, [NAME], size=size)),
        )
        for size in (1e-4, 10.0)
    )
    report = adapter_report(small, CONFIG, weights)
    (loss,) = report.losses
    a, b = random_factors(model, [NAME], size=1e-4)[NAME]
    before = released_state(model)[f"{NAME}.weight"]
    delta = b.float() @ a.float()
    lost = ((before.float() + delta).bfloat16() == before) & (delta != 0)
    assert loss.lost == int(lost.sum())
    assert loss.changed == delta.numel()
    assert report.lost_share == pytest.approx(loss.lost / loss.changed)
    wrong = (before.float() + delta).bfloat16().float() - before.float() - delta
    assert loss.error_ratio == pytest.approx(float(wrong.norm() / delta.norm()), rel=1e-5)
    assert report.should_stay_apart
    assert not adapter_report(large, CONFIG, weights).should_stay_apart


def test_rows_are_sampled(tmp_path: Path, file: Path) -> None:
    weights = write_single(tmp_path / "w.safetensors", released_state(unpacked_model(CONFIG)))
    report = adapter_report(file, CONFIG, weights, rows=16)
    assert len(report.losses) == len(FACTORS)
    assert all(loss.changed <= 32 * 320 for loss in report.losses)


def test_without_weights_the_report_says_what_the_adapter_is(file: Path) -> None:
    report = adapter_report(file, CONFIG)
    assert report.losses == ()
    assert report.summary == "24 linears, ranks [8], scales 1"
    assert report.lost_share == 0.0
