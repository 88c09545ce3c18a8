"""Memory that does not suffice: told before anything is allocated, and survived in a rollout."""

from __future__ import annotations

import dataclasses
import gc
import weakref

import pytest
import torch

from engine.cache_buffers import BufferShape, allocate
from engine.checkpoint.reading import empty_model
from engine.config import EngineConfig, Geometry, preset
from engine.core import RolloutCore
from engine.device import smaller_geometries, within_memory
from engine.engine import Engine
from engine.errors import DeviceError, OutOfMemoryError
from engine.memory import (
    GIB,
    MemoryPart,
    Present,
    choose_plan,
    engine_parts,
    nothing_beside,
    parameter_count,
    window_bytes,
)
from engine.model.dit import FP32_MODULES
from engine.quant import quantize_
from engine.schemes import scheme_of
from engine.types import Action
from tests.allocator import AllocatorLimit
from tests.tiny import block_config, random_anchor, tiny_config, tiny_engine

pytestmark = pytest.mark.cpu

CPU = torch.device("cpu")
H3 = preset("h3_33b").model


def test_parameters_of_the_released_model():
    assert parameter_count(H3) == 33_122_992_896


def test_smaller_sizes_keep_the_shape():
    sizes = [(each.width_px, each.height_px) for each in smaller_geometries(H3.geometry)]
    assert sizes[0] == (1280, 736)
    assert (1120, 640) in sizes
    assert sizes[-1] == (64, 32)


SMALL = preset("h3_33b", Geometry(height_px=480, width_px=832)).model
BF16 = EngineConfig(dtype="bfloat16")


def _gpu(device_gib, host_gib=1_000.0):
    return Present(device_gib=device_gib, host_gib=host_gib, is_cuda=True, has_fp8=True)


def _plan(model, device_gib, *, config=BF16, **options):
    return choose_plan(model, config, _gpu(device_gib), **options)


def test_parts_of_the_large_model_are_as_published():
    # 66.2 GB of weights, 26.0 GB of them behind the modulation; 36.1 GB for five raw chunks, to
    # which the packed form adds prefix, current chunk and the rotary channels once more.
    plan = _plan(H3, 1_000.0)
    weights = ("blocks", "embedders, refiner, heads", "modulation weights")
    assert 61.5 < sum(plan.part_gib(name) for name in weights) < 62.0
    assert plan.part_gib("modulation weights") == pytest.approx(26.02e9 / 2**30, rel=1e-3)
    assert 33.65 < plan.part_gib("window") < 2 * 33.65
    assert plan.part_gib("modulation tables") < 0.2


@pytest.mark.parametrize("prefix_rows", [5, 9])
def test_the_window_has_the_size_that_is_allocated(prefix_rows):
    config = tiny_config()
    text_rows = prefix_rows - config.rows_per_latent - config.audio_rows
    config = dataclasses.replace(config, text=dataclasses.replace(config.text, rows=text_rows))
    shape = BufferShape(batch_size=1, heads=config.num_attention_heads, prefix_room=prefix_rows)
    buffers = allocate(config, shape, device=CPU, dtype=torch.bfloat16)
    lists = (buffers.keys_BSNK, buffers.values_BSNK, buffers.raw_BSNK, buffers.newest_BRNK)
    found = sum(tensor.nbytes for tensors in lists for tensor in tensors)
    found += buffers.cos_SK.nbytes + buffers.sin_SK.nbytes
    assert window_bytes(config, 2) == found


@pytest.mark.parametrize("linear", ["bf16", "fp8_rowwise", "fp8_mixed", "fp8_block"])
@pytest.mark.parametrize("free_adaln", [False, True], ids=["whole", "freed"])
def test_weights_have_the_size_that_an_engine_holds(linear, free_adaln):
    config = block_config(num_layers=7)
    model = empty_model(config, dtype=torch.bfloat16, device=CPU)
    model.load_state_dict({name: torch.zeros_like(x) for name, x in model.state_dict().items()})
    quantize_(model, scheme_of(linear))
    if free_adaln:
        RolloutCore(model).free_adaln()
    tensors = [*model.parameters(), *model.buffers()]
    islands = [each for name in FP32_MODULES for each in getattr(model, name).parameters()]
    asked = EngineConfig(dtype="bfloat16", linear=linear, free_adaln=free_adaln)
    planned = sum(part.playing for part in engine_parts(config, asked, is_cuda=False)[:3])
    # The plan takes fp32 islands for bfloat16, which is 0.1 % of the large model.
    held = sum(each.nbytes for each in tensors) - sum(each.nbytes // 2 for each in islands)
    assert planned == held


def test_what_fits_is_left_as_it_is():
    plan = _plan(H3, 139.0)
    assert (plan.linear, plan.free_adaln) == ("bf16", False)


@pytest.mark.parametrize(
    ("device_gib", "expected"),
    [
        (100.0, ("bf16", 0, False)),
        (85.0, ("bf16", 0, True)),
        (67.5, ("bf16", 1, True)),
        (64.0, ("fp8_mixed", 0, True)),
    ],
    ids=["all", "tables", "beside", "eight-bits"],
)
def test_things_are_given_up_in_order(device_gib, expected):
    def beside(size):
        return (MemoryPart.played("decoder", 4 * GIB),)

    plan = _plan(SMALL, device_gib, beside=(beside, nothing_beside))
    assert (plan.linear, plan.beside_index, plan.free_adaln) == expected


@pytest.mark.parametrize(
    ("device_gib", "no_blocks", "changes", "expected"),
    [
        (105.0, None, {}, ("bf16", "")),
        (90.0, None, {}, ("fp8_mixed", "bf16 needs 103.9 GiB")),
        (88.0, None, {}, ("fp8_rowwise", "bf16 needs 103.9 GiB, fp8_mixed needs 89.1 GiB")),
        (90.0, "no Hopper", {}, ("fp8_rowwise", "bf16 needs 103.9 GiB, no fp8_mixed: no Hopper")),
        (
            90.0,
            None,
            {"ffn_dim": 14352},
            (
                "fp8_rowwise",
                "bf16 needs 104.0 GiB, no fp8_mixed: ffn_dim is 14352 and down in eight bits in "
                "blocks needs multiples of 128",
            ),
        ),
    ],
    ids=["bf16", "mixed", "by-row", "device", "widths"],
)
def test_linears_are_the_best_that_fit_and_say_why(device_gib, no_blocks, changes, expected):
    present = dataclasses.replace(_gpu(device_gib), no_fp8_blocks=no_blocks)
    plan = choose_plan(dataclasses.replace(H3, **changes), BF16, present)
    assert (plan.linear, plan.linear_reason) == expected


def test_linears_that_were_asked_for_need_no_reason():
    plan = _plan(H3, 90.0, config=dataclasses.replace(BF16, linear="fp8_mixed"))
    assert plan.linear_words == "fp8_mixed"


def test_linears_that_want_room_on_the_machine_say_so():
    def half_on_the_host(size):
        return (MemoryPart(name="encoder", loading=0, playing=0, host=13 * GIB),)

    # The modulation's third goes to the machine's memory, and would not fit there.
    present = _gpu(77.0, host_gib=20.0)
    plan = choose_plan(SMALL, BF16, present, beside=(half_on_the_host,))
    assert (plan.linear, plan.free_adaln) == ("fp8_mixed", False)
    assert plan.linear_reason == "bf16 needs 21.1 GiB of the machine"


def test_what_was_asked_for_is_not_changed():
    asked = dataclasses.replace(BF16, linear="bf16", free_adaln=False)
    with pytest.raises(DeviceError, match=r"linear fp8_mixed fits and free_adaln fits"):
        _plan(SMALL, 85.0, config=asked)


def test_eight_bits_need_a_device_that_has_them():
    present = Present(device_gib=64.0, is_cuda=True)
    with pytest.raises(DeviceError, match=r"832x480 in bfloat16 needs about 6\d\.\d GiB") as caught:
        choose_plan(SMALL, BF16, present)
    # The machine has room for its part.
    assert "of the machine" not in str(caught.value)


def test_what_is_lost_between_allocations_is_in_what_is_needed():
    with pytest.raises(DeviceError, match=r"needs about 6[34]\.\d GiB .*; 63\.0 GiB are free"):
        _plan(SMALL, 63.0)  # whose weights alone are 62.5


def test_the_machine_must_have_room_for_what_is_put_there():
    def on_the_host(size):
        return (MemoryPart(name="prompt encoder", loading=0, playing=0, host=47 * GIB),)

    with pytest.raises(DeviceError, match=r"55\.1 GiB of the machine, of which 20\.0 are"):
        choose_plan(SMALL, BF16, _gpu(139.0, host_gib=20.0), beside=(on_the_host,))


def test_on_a_gpu_the_machine_takes_the_third_for_audio_times():
    freed = dataclasses.replace(BF16, free_adaln=True)
    plan = _plan(SMALL, 139.0, config=freed)
    # There are two places for a layer's third, and twice as much before them.
    assert plan.part_gib("modulation weights") == pytest.approx(4 * plan.host_gib / H3.num_layers)
    assert plan.host_gib == pytest.approx(26.02e9 / 3 / 2**30, rel=1e-3)
    with pytest.raises(DeviceError, match=r"8\.1 GiB of the machine, of which 8\.0 are"):
        choose_plan(SMALL, freed, _gpu(139.0, host_gib=8.0))


def test_weights_that_are_given_up_count_while_they_are_read():
    freed = dataclasses.replace(BF16, free_adaln=True, linear="fp8_rowwise")
    plan = _plan(SMALL, 139.0, config=freed)
    assert plan.loading_gib > 61.5
    assert plan.peak_gib == max(plan.loading_gib, plan.playing_gib)


def test_random_weights_name_the_nearest_size(monkeypatch):
    monkeypatch.setattr("engine.device.available_gib", lambda device: 90.0)
    config = EngineConfig(device="cpu", dtype="bfloat16")
    with pytest.raises(DeviceError, match=r"90\.0 GiB are free; \d+x\d+ fits") as caught:
        Engine.from_random(H3, config)
    width_px, height_px = map(int, str(caught.value).split()[-2].split("x"))
    nearest = Geometry(width_px=width_px, height_px=height_px)
    larger = [each for each in smaller_geometries(H3.geometry) if each.height_px > height_px]
    assert nearest in smaller_geometries(H3.geometry)
    choose_plan(preset("h3_33b", nearest).model, config, Present(device_gib=90.0))
    for size in larger:
        with pytest.raises(DeviceError):
            choose_plan(preset("h3_33b", size).model, config, Present(device_gib=90.0))


def test_the_picture_size_that_fits_is_named():
    with pytest.raises(DeviceError, match="; 832x480 fits"):
        _plan(H3, 80.0, geometries=preset("h3_33b").geometries)


def test_the_dtype_that_fits_is_named():
    with pytest.raises(DeviceError, match=r"1344x768 in float32 .* free; bfloat16 fits$"):
        _plan(H3, 139.0, config=EngineConfig(dtype="float32"))


def test_ranks_share_the_window():
    with pytest.raises(DeviceError, match="window"):
        _plan(H3, 80.0)
    _plan(H3, 80.0, world_size=2)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        MemoryError("no more"),
    ],
    ids=["cuda", "cpu", "python"],
)
def test_errors_of_allocators_have_one_type(error):
    def fail():
        raise error

    with pytest.raises(OutOfMemoryError, match=r"memory ran out in a test \(.*\); \d+\.\d GiB"):
        within_memory(CPU, "a test", fail)


def test_other_errors_pass():
    def fail():
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        within_memory(CPU, "a test", fail)


def test_the_error_holds_nothing_of_what_failed():
    class Held:
        pass

    seen = []

    def fail():
        held = Held()
        seen.append(weakref.ref(held))
        raise MemoryError

    with pytest.raises(OutOfMemoryError) as caught:
        within_memory(CPU, "a test", fail)
    gc.collect()
    assert caught.value.__context__ is None
    assert seen[0]() is None


_WORK = {
    "start": lambda engine, rollout, anchor: engine.new_rollout("snow", anchor_BCTHW=anchor),
    "prompt": lambda engine, rollout, anchor: engine.set_prompt(rollout, "night"),
    "step": lambda engine, rollout, anchor: engine.step(rollout, Action.still()),
}


@pytest.mark.parametrize("when", _WORK)
def test_a_rollout_that_runs_out_leaves_the_engine_usable(when):
    engine, anchor_BCTHW = tiny_engine(), random_anchor(tiny_config())
    rollouts = [engine.new_rollout("meadow", anchor_BCTHW=anchor_BCTHW) for _ in range(3)]
    expected = engine.step(rollouts[0], Action.still()).latents_BCTHW
    with AllocatorLimit(20_000), pytest.raises(OutOfMemoryError, match="Tried to allocate"):
        _WORK[when](engine, rollouts[1], anchor_BCTHW)
    assert torch.equal(engine.step(rollouts[2], Action.still()).latents_BCTHW, expected)
