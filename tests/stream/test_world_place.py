"""Which GPUs worlds get, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError, DeviceError
from stream.world_place import neighbour_count, place_world
from stream.world_spec import WorldSpec
from tests.stream.painted_worlds import SPEC

pytestmark = pytest.mark.cpu


def _spec(
    seat: int = 0, *, worlds: int = 1, ranks: int = 1, device: str = "auto", dtype: str = "float32"
) -> WorldSpec:
    engine = EngineConfig(device=device, dtype=dtype)  # type: ignore[arg-type]
    return dataclasses.replace(SPEC, world_count=worlds, rank_count=ranks, seat=seat, engine=engine)


@pytest.mark.parametrize(
    ("worlds", "ranks", "gpus", "expected"),
    [
        (1, 1, 1, ["0"]),
        (3, 1, 2, ["0", "1", "0"]),
        (2, 1, 8, ["0", "1"]),
        (1, 2, 2, ["01"]),
        (2, 2, 5, ["01", "23"]),
        (2, 4, 8, ["0123", "4567"]),
    ],
)
def test_seats_take_gpus_in_turn(worlds: int, ranks: int, gpus: int, expected: list[str]) -> None:
    for seat, indices in enumerate(expected):
        for device in ("auto", "cuda"):
            spec = _spec(seat, worlds=worlds, ranks=ranks, device=device)
            assert place_world(spec, gpus) == tuple(f"cuda:{index}" for index in indices)


def test_a_gpu_that_is_named_stays_what_it_is() -> None:
    assert place_world(_spec(3, worlds=4, device="cuda:1"), 4) == ("cuda:1",)


@pytest.mark.parametrize(("device", "gpus"), [("auto", 0), ("cpu", 0), ("cpu", 8)])
def test_ranks_share_a_cpu(device: str, gpus: int) -> None:
    assert place_world(_spec(1, worlds=2, ranks=3, device=device), gpus) == ("cpu",) * 3
    assert place_world(_spec(device=device, dtype="auto"), gpus) == ("cpu",)


def test_ranks_on_a_cpu_need_a_dtype_by_name() -> None:
    with pytest.raises(ConfigError, match="dtype: 'auto' with ranks 2 on a CPU; allowed: float32"):
        place_world(_spec(ranks=2, dtype="auto"), 0)
    assert place_world(_spec(ranks=2, dtype="auto"), 2) == ("cuda:0", "cuda:1")


@pytest.mark.parametrize(("device", "worlds", "gpus"), [("auto", 2, 3), ("cuda", 1, 0)])
def test_too_few_gpus_are_refused(device: str, worlds: int, gpus: int) -> None:
    message = f"ranks: 2 with max_sessions {worlds} take {2 * worlds} GPUs; this machine has {gpus}"
    with pytest.raises(DeviceError, match=message):
        place_world(_spec(ranks=2, worlds=worlds, device=device), gpus)


@pytest.mark.parametrize(
    ("seat", "device", "gpus", "expected"),
    [(0, "auto", 2, 1), (1, "auto", 2, 0), (0, "auto", 1, 2), (0, "cuda:0", 2, 2)],
)
def test_worlds_of_the_same_gpu_are_counted(
    seat: int, device: str, gpus: int, expected: int
) -> None:
    spec = _spec(seat, worlds=3, device=device)
    assert neighbour_count(spec, place_world(spec, gpus)[0], gpus) == expected
