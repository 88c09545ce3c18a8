import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.types import AXES, Action, Control
from stream.actions import (
    KEYS,
    LOOK_DEG_PER_PX,
    PRESS_CAPACITY,
    STALE_MS,
    ActionMailbox,
    ActionSnapshot,
    Edge,
    Latched,
    held_axes,
)

pytestmark = pytest.mark.cpu

NOW = 1_000_000.0


@pytest.fixture
def writer() -> Iterator[ActionMailbox]:
    mailbox = ActionMailbox.create()
    yield mailbox
    mailbox.close()


@pytest.fixture
def reader(writer: ActionMailbox) -> Iterator[ActionMailbox]:
    mailbox = ActionMailbox.attach(writer.name)
    yield mailbox
    mailbox.close()


def _edges(*codes: str, first_id: int = 1) -> tuple[Edge, ...]:
    """Edges in order; a leading minus is a key going up."""
    return tuple(
        Edge(id=first_id + i, code=code.lstrip("-"), is_down=code[0] != "-", ct_ms=0.0)
        for i, code in enumerate(codes)
    )


def _snapshot(
    seq: int,
    *held: str,
    edges: tuple[Edge, ...] = (),
    look: tuple[float, float] = (0.0, 0.0),
    pad: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0),
    at_ms: float = NOW,
) -> ActionSnapshot:
    return ActionSnapshot(
        seq=seq, held=frozenset(held), edges=edges, look=look, pad=pad, received_ms=at_ms
    )


def _latched(reader: ActionMailbox, now_ms: float = NOW) -> dict[str, float]:
    return _axes(reader.latch(now_ms))


def _axes(latched: Latched) -> dict[str, float]:
    """Axes that are not zero; they are the same in all 17 frames."""
    axes_FA = latched.action.axes_FA
    assert np.all(axes_FA == axes_FA[0])
    return {name: value for name, value in zip(AXES, axes_FA[0].tolist(), strict=True) if value}


@pytest.mark.parametrize("code", KEYS)
def test_each_key_moves_as_its_control_does(code: str) -> None:
    expected = Action.from_keys([[Control(KEYS[code])]] * 17)
    assert held_axes({code: 0}) == expected.axes_FA[0].tolist()


def test_held_keys_last_until_they_are_let_go(writer: ActionMailbox, reader: ActionMailbox) -> None:
    writer.post(_snapshot(1, "KeyW", "ShiftLeft", edges=_edges("KeyW", "ShiftLeft")))
    assert _latched(reader) == {"forward": 1.0, "boost": 1.0}
    assert _latched(reader) == {"forward": 1.0, "boost": 1.0}
    writer.post(_snapshot(2))
    assert _latched(reader) == {}


def test_a_tap_between_latches_moves_one_chunk(
    writer: ActionMailbox, reader: ActionMailbox
) -> None:
    tap = _edges("KeyD", "-KeyD")
    writer.post(_snapshot(1, "KeyD", edges=tap[:1]))
    writer.post(_snapshot(2, edges=tap))
    assert _latched(reader) == {"right": 1.0}
    writer.post(_snapshot(3, edges=tap))
    assert _latched(reader) == {}


def test_a_tap_is_not_lost_to_a_late_latch(writer: ActionMailbox, reader: ActionMailbox) -> None:
    writer.post(_snapshot(1, edges=_edges("KeyD", "-KeyD")))
    assert _latched(reader, NOW + 2 * STALE_MS) == {"right": 1.0}


@pytest.mark.parametrize(
    ("order", "expected"), [(("KeyA", "KeyD"), 1.0), (("KeyD", "KeyA"), -1.0)], ids=["d", "a"]
)
def test_of_opposed_keys_the_newest_wins(
    writer: ActionMailbox, reader: ActionMailbox, order: tuple[str, str], expected: float
) -> None:
    writer.post(_snapshot(1, *order, edges=_edges(*order)))
    assert _latched(reader) == {"right": expected}
    assert _latched(reader) == {"right": expected}


def test_a_tap_against_a_held_key_turns_one_chunk(
    writer: ActionMailbox, reader: ActionMailbox
) -> None:
    writer.post(_snapshot(1, "KeyW", edges=_edges("KeyW")))
    assert _latched(reader) == {"forward": 1.0}
    writer.post(_snapshot(2, "KeyW", edges=_edges("KeyW", "KeyS", "-KeyS")))
    assert _latched(reader) == {"forward": -1.0}
    assert _latched(reader) == {"forward": 1.0}


def test_opposed_keys_of_unknown_order_cancel() -> None:
    assert held_axes({"KeyA": 0, "KeyD": 0}) == [0.0] * 5


def test_an_old_snapshot_counts_as_empty(writer: ActionMailbox, reader: ActionMailbox) -> None:
    writer.post(_snapshot(7, "KeyW", pad=(0.0, -1.0, 0.0, 0.0), at_ms=NOW))
    assert _latched(reader, NOW + STALE_MS) == {"forward": 1.0}
    stale = reader.latch(NOW + STALE_MS + 1.0)
    assert not stale.action.axes_FA.any()
    assert stale.act_seq == 7


def test_a_snapshot_of_a_clock_that_was_set_back_counts_as_empty(
    writer: ActionMailbox, reader: ActionMailbox
) -> None:
    writer.post(_snapshot(1, "KeyW", at_ms=NOW + 3_600_000.0))
    assert _latched(reader) == {}


def test_older_sequence_numbers_are_dropped(writer: ActionMailbox, reader: ActionMailbox) -> None:
    assert writer.post(_snapshot(5))
    assert not writer.post(_snapshot(5, "KeyW"))
    assert not writer.post(_snapshot(4, "KeyW"))
    assert _latched(reader) == {}


def test_clear_lets_go_of_everything(writer: ActionMailbox, reader: ActionMailbox) -> None:
    writer.post(_snapshot(1, "KeyW", edges=_edges("KeyW", "KeyD", "-KeyD"), look=(9.0, 0.0)))
    reader.latch(NOW)
    writer.post(_snapshot(2, "KeyW", edges=_edges("KeyA", "-KeyA", first_id=9), look=(9.0, 0.0)))
    writer.clear()
    assert _latched(reader) == {}
    assert not writer.post(_snapshot(2, "KeyW"))


def test_motion_before_a_clear_turns_nothing(writer: ActionMailbox, reader: ActionMailbox) -> None:
    writer.post(_snapshot(1, look=(100.0, 20.0)))
    writer.clear()
    assert _latched(reader) == {}
    writer.post(_snapshot(2, look=(110.0, 20.0)))
    axes = _latched(reader)
    assert axes["yaw"] * 17 * 1.2 == pytest.approx(10.0 * LOOK_DEG_PER_PX)


def test_forgotten_motion_leaves_what_is_held(writer: ActionMailbox, reader: ActionMailbox) -> None:
    reader.latch(NOW)
    writer.post(_snapshot(1, "KeyW", edges=_edges("KeyD", "-KeyD"), look=(900.0, 0.0)))
    writer.forget_motion()
    assert _latched(reader) == {"forward": 1.0, "right": 1.0}
    writer.post(_snapshot(2, look=(1000.0, 0.0)))
    axes = _latched(reader)
    assert axes["yaw"] * 17 * 1.2 == pytest.approx(100.0 * LOOK_DEG_PER_PX)


def test_begin_forgets_what_was_forgotten(writer: ActionMailbox, reader: ActionMailbox) -> None:
    writer.post(_snapshot(1, look=(900.0, 0.0)))
    writer.clear()
    writer.begin()
    assert _latched(reader) == {}


def test_begin_takes_low_numbers_again(writer: ActionMailbox, reader: ActionMailbox) -> None:
    writer.post(_snapshot(90, "KeyW", edges=_edges("KeyW", first_id=50), look=(500.0, 0.0)))
    reader.latch(NOW)
    writer.begin()
    assert writer.post(_snapshot(1, "KeyD", edges=_edges("KeyD"), look=(0.0, 0.0)))
    assert _latched(reader) == {"right": 1.0}


def test_look_turns_by_its_angle_once(writer: ActionMailbox, reader: ActionMailbox) -> None:
    writer.post(_snapshot(1, look=(100.0, 20.0)))
    axes = _latched(reader)
    assert axes["yaw"] * 17 * 1.2 == pytest.approx(100.0 * LOOK_DEG_PER_PX)
    assert axes["pitch"] * 17 * 0.4 == pytest.approx(-20.0 * LOOK_DEG_PER_PX)
    assert _latched(reader) == {}


def test_look_is_bounded(writer: ActionMailbox, reader: ActionMailbox) -> None:
    writer.post(_snapshot(1, look=(-1e9, -1e9)))
    assert _latched(reader) == {"yaw": -1.0, "pitch": 1.0}


def test_pad_walks_and_looks(writer: ActionMailbox, reader: ActionMailbox) -> None:
    writer.post(_snapshot(1, pad=(0.5, -0.25, -1.0, 0.75)))
    assert _latched(reader) == {"forward": 0.25, "right": 0.5, "yaw": -1.0, "pitch": -0.75}


def test_codes_without_a_control_do_nothing(writer: ActionMailbox, reader: ActionMailbox) -> None:
    writer.post(_snapshot(1, "Space", "KeyW", edges=_edges("Space", "Escape")))
    assert _latched(reader) == {"forward": 1.0}


def test_presses_that_do_not_fit_are_counted(writer: ActionMailbox, reader: ActionMailbox) -> None:
    writer.post(_snapshot(1, edges=_edges("KeyD", *["KeyA"] * PRESS_CAPACITY)))
    latched = reader.latch(NOW)
    assert _axes(latched) == {"right": -1.0}
    assert latched.lost_press_count == 1
    assert reader.latch(NOW).lost_press_count == 0


def test_a_later_reader_sees_what_is_held_but_no_old_tap(writer: ActionMailbox) -> None:
    writer.post(_snapshot(3, "KeyW", edges=_edges("KeyW", "KeyD", "-KeyD"), look=(50.0, 0.0)))
    later = ActionMailbox.attach(writer.name)
    assert _latched(later) == {"forward": 1.0}
    later.close()


def test_reading_while_writing_never_mixes_two_snapshots(
    writer: ActionMailbox, reader: ActionMailbox
) -> None:
    """Left and right stick always carry the same number."""
    stop = threading.Event()

    def write() -> None:
        seq = 0
        while not stop.is_set():
            seq += 1
            share = seq % 100 / 100.0
            writer.post(_snapshot(seq, pad=(share, 0.0, share, 0.0)))

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(300):
            axes_A = reader.latch(NOW).action.axes_FA[0]
            assert axes_A[1] == axes_A[2]
    finally:
        stop.set()
        thread.join()


@given(
    held=st.sets(st.sampled_from([*KEYS, "Space"])),
    look=st.tuples(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6)),
    pad=st.tuples(*[st.floats(-1.0, 1.0)] * 4),
)
def test_any_snapshot_makes_an_action(
    held: set[str], look: tuple[float, float], pad: tuple[float, float, float, float]
) -> None:
    writer = ActionMailbox.create()
    reader = ActionMailbox.attach(writer.name)
    writer.post(_snapshot(1, *held, look=look, pad=pad))
    assert reader.latch(NOW).act_seq == 1
    reader.close()
    writer.close()
