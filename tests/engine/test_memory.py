"""Memory that does not suffice: told before anything is allocated, and survived in a rollout."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from engine.config import EngineConfig, Geometry, memory_needed, preset
from engine.device import check_memory, smaller_geometries, within_memory
from engine.engine import Engine
from engine.errors import DeviceError, OutOfMemoryError
from engine.types import Action
from tests.allocator import AllocatorLimit
from tests.tiny import random_anchor, tiny_config, tiny_engine

pytestmark = pytest.mark.cpu

CPU = torch.device("cpu")
H3 = preset("h3_33b").model


def test_smaller_sizes_keep_the_shape():
    sizes = [(each.width_px, each.height_px) for each in smaller_geometries(H3.geometry)]
    assert sizes[0] == (1280, 736)
    assert (1120, 640) in sizes
    assert sizes[-1] == (64, 32)


def test_random_weights_name_the_nearest_size(monkeypatch):
    monkeypatch.setattr("engine.engine.available_gib", lambda device: 90.0)
    with pytest.raises(DeviceError, match=r"90\.0 GiB are free; \d+x\d+ fits") as caught:
        Engine.from_random(H3, EngineConfig(device="cpu", dtype="bfloat16"))
    width_px, height_px = map(int, str(caught.value).split()[-2].split("x"))
    nearest = Geometry(width_px=width_px, height_px=height_px)
    larger = [each for each in smaller_geometries(H3.geometry) if each.height_px > height_px]
    assert nearest in smaller_geometries(H3.geometry)
    for size, is_fitting in [(nearest, True), *((each, False) for each in larger)]:
        need = memory_needed(preset("h3_33b", size).model, "bfloat16").total_gib
        assert (need <= 90.0) == is_fitting


def test_the_dtype_that_fits_is_named():
    with pytest.raises(DeviceError, match=r"1344x768 in float32 .* free; bfloat16 fits$"):
        check_memory(H3, "float32", 139.0, ())


def test_ranks_share_the_window():
    with pytest.raises(DeviceError, match="window"):
        check_memory(H3, "bfloat16", 100.0, ())
    check_memory(H3, "bfloat16", 100.0, (), world_size=2)


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
