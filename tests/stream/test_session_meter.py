"""Figures of a session: from its reports and messages to the metrics of the service."""

from __future__ import annotations

from typing import Any, cast

import pytest

from stream import session_meter
from stream.actions import ActionSnapshot, Edge
from stream.chunk_notice import DueTimes
from stream.inputs import Input
from stream.metrics import Metrics
from stream.session_meter import SessionMeter
from stream.viewer import Viewer
from stream.worker_messages import ChunkDone, ChunkStarted

pytestmark = pytest.mark.cpu


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def meter(metrics: Metrics, monkeypatch: pytest.MonkeyPatch) -> SessionMeter:
    monkeypatch.setattr(session_meter, "wall_ms", lambda: 5_400.0)
    return SessionMeter(metrics)


def _press(seq: int, ct_ms: float) -> Input:
    edges = (Edge(id=seq, code="KeyW", is_down=True, ct_ms=ct_ms),)
    snapshot = ActionSnapshot(
        seq=seq, held=frozenset({"KeyW"}), look=(0.0, 0.0), pad=(0.0,) * 4, edges=edges,
        received_ms=0.0,
    )  # fmt: skip
    return Input(snapshot=snapshot, new_edges=edges, is_press=True, has_content=True)


def _started(act_seq: int, latch_ms: float, lost: int = 0) -> ChunkStarted:
    return ChunkStarted(epoch=0, chunk=1, latch_ms=latch_ms, act_seq=act_seq, lost_press_count=lost)


def _count_and_sum(metrics: Metrics, what: str, **labels: str) -> tuple[float, float]:
    name = {
        "present": metrics.present_s, "latch": metrics.latch_age_s, "photon": metrics.photon_s,
        "frame": metrics.frame_photon_s,
    }[what]._name  # fmt: skip
    value = metrics.registry.get_sample_value
    return value(f"{name}_count", labels) or 0.0, value(f"{name}_sum", labels) or 0.0


def _viewer(role: Any = "controller") -> Viewer:
    viewer = Viewer(id="a", role=role, socket=cast(Any, None), transport="rtc")
    viewer.clock.heard(1_000.0, 1_000.0)
    return viewer


def test_a_press_waits_until_a_chunk_plays_that_shows_it(
    meter: SessionMeter, metrics: Metrics
) -> None:
    meter.acted(1, _press(1, 900.0), 5_000.0)
    meter.acted(2, _press(2, 950.0), 5_300.0)
    meter.presented(1)
    assert _count_and_sum(metrics, "present") == (1, pytest.approx(0.4))
    meter.presented(1)
    meter.presented(2)
    assert _count_and_sum(metrics, "present") == (2, pytest.approx(0.5))


def test_a_chunk_tells_how_old_the_action_was_that_it_took(
    meter: SessionMeter, metrics: Metrics
) -> None:
    meter.chunk_started(_started(0, 4_900.0, lost=2))
    assert meter.latch_age_ms is None
    meter.acted(1, _press(1, 900.0), 5_000.0)
    meter.chunk_started(_started(1, 5_030.0))
    assert meter.latch_age_ms == pytest.approx(30.0)
    assert _count_and_sum(metrics, "latch") == (1, pytest.approx(0.03))
    assert metrics.drops.labels(where="press")._value.get() == 2


def _done(total_ms: float) -> ChunkDone:
    return ChunkDone(
        epoch=0, chunk=0, denoise_ms=(50.0, 60.0), refresh_ms=40.0, first_frame_ms=120.0,
        first_decode_ms=10.0, decode_ms=70.0, ring_wait_ms=300.0, total_ms=total_ms,
    )  # fmt: skip


def test_a_chunk_costs_what_it_took_but_for_the_wait_for_room(
    meter: SessionMeter, metrics: Metrics
) -> None:
    assert meter.chunk_ms is None
    assert meter.chunk_done(_done(500.0)) == meter.chunk_ms == 200.0
    seconds = {
        "chunk": 0.2, "denoise": 0.11, "refresh": 0.04, "first_frame": 0.12, "first_decode": 0.01,
        "decode": 0.07, "ring_wait": 0.3,
    }  # fmt: skip
    for what, expected in seconds.items():
        name = getattr(metrics, f"{what}_s")._name
        assert metrics.registry.get_sample_value(f"{name}_sum") == pytest.approx(expected), what


def test_a_chunk_is_slow_against_those_before_and_that_is_said_once(meter: SessionMeter) -> None:
    assert meter.is_slow(6_000.0)
    assert not meter.is_slow(7_000.0)
    meter.chunk_done(_done(4_300.0))
    assert not meter.is_slow(11_000.0)
    assert meter.is_slow(13_000.0)


@pytest.mark.parametrize(("role", "count"), [("controller", 1), ("viewer", 0)])
def test_what_the_player_sees_of_a_press_is_its_latency(
    meter: SessionMeter, metrics: Metrics, role: str, count: int
) -> None:
    meter.acted(1, _press(1, 900.0), 5_000.0)
    meter.frame_made(7, 1)
    meter.shown(_viewer(role), [(7, 1_300.0)], DueTimes())
    assert _count_and_sum(metrics, "photon", transport="rtc")[0] == count
    assert metrics.frames_shown._value.get() == 1


def test_presses_that_were_let_go_have_no_latency(meter: SessionMeter, metrics: Metrics) -> None:
    meter.acted(1, _press(1, 900.0), 5_000.0)
    meter.forget_presses()
    meter.frame_made(7, 1)
    meter.shown(_viewer(), [(7, 1_300.0)], DueTimes())
    meter.presented(1)
    assert _count_and_sum(metrics, "photon", transport="rtc") == (0, 0)
    assert _count_and_sum(metrics, "present") == (0, 0)


def test_a_frame_is_as_old_as_it_is_shown_after_it_left(
    meter: SessionMeter, metrics: Metrics
) -> None:
    class Due(DueTimes):
        def due_ms(self, frame_id: int) -> float | None:
            return 1_250.0 if frame_id == 7 else None

    meter.shown(_viewer("viewer"), [(7, 1_300.0), (8, 1_300.0)], Due())
    assert _count_and_sum(metrics, "frame", transport="rtc") == (1, pytest.approx(0.05))
