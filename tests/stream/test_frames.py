import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from engine.errors import StateError
from stream.frames import FrameRing, RingCancelledError, SlotState

pytestmark = pytest.mark.cpu

SIZE = {"width_px": 8, "height_px": 4}


@pytest.fixture
def reader() -> Iterator[FrameRing]:
    ring = FrameRing.create(**SIZE, capacity=3)
    yield ring
    ring.close()


@pytest.fixture
def writer(reader: FrameRing) -> Iterator[FrameRing]:
    ring = FrameRing.attach(reader.handle)
    yield ring
    ring.close()


def _frame(value: int) -> np.ndarray:
    return np.full((4, 8, 3), value, np.uint8)


def _start(target: object) -> threading.Thread:
    thread = threading.Thread(target=target, daemon=True)  # type: ignore[arg-type]
    thread.start()
    return thread


def test_a_frame_crosses_as_it_is(writer: FrameRing, reader: FrameRing) -> None:
    frame_HWC = np.random.default_rng(0).integers(0, 256, (4, 8, 3), np.uint8)
    slot = writer.write(frame_HWC)
    assert reader.state(slot) is SlotState.READY
    assert np.array_equal(reader.read(slot), frame_HWC)
    assert reader.state(slot) is SlotState.READING
    assert reader.taken_count == 1
    reader.release(slot)
    assert reader.taken_count == 0


def test_the_writer_knows_when_a_slot_was_freed_last(writer: FrameRing, reader: FrameRing) -> None:
    assert writer.released_s == 0.0
    slots = [writer.write(_frame(each)) for each in range(3)]
    begin_s = time.monotonic()
    reader.release(slots[0])
    first_s = writer.released_s
    reader.release(slots[2])
    assert begin_s <= first_s <= writer.released_s <= time.monotonic()
    assert np.array_equal(reader.read(slots[1]), _frame(1))


def test_what_was_read_stays_when_the_slot_is_used_again(
    writer: FrameRing, reader: FrameRing
) -> None:
    slot = writer.write(_frame(1))
    read = reader.read(slot)
    reader.release(slot)
    for value in range(2, 5):
        writer.write(_frame(value))
    assert np.array_equal(read, _frame(1))


def test_a_full_ring_blocks_until_a_release(writer: FrameRing, reader: FrameRing) -> None:
    slots = [writer.write(_frame(value)) for value in range(3)]
    written: list[int] = []
    thread = _start(lambda: written.append(writer.write(_frame(9))))
    thread.join(0.05)
    assert thread.is_alive()
    reader.release(slots[1])
    thread.join(10.0)
    assert written == [slots[1]]
    assert np.array_equal(reader.read(slots[1]), _frame(9))
    assert np.array_equal(reader.read(slots[0]), _frame(0))


def test_cancel_ends_the_wait_and_resume_undoes_it(writer: FrameRing, reader: FrameRing) -> None:
    slots = [writer.write(_frame(value)) for value in range(3)]
    caught: list[Exception] = []

    def write() -> None:
        try:
            writer.write(_frame(9))
        except RingCancelledError as error:
            caught.append(error)

    thread = _start(write)
    thread.join(0.05)
    writer.cancel()
    writer.cancel()
    thread.join(10.0)
    assert len(caught) == 1
    writer.resume()
    reader.release(slots[0])
    assert writer.write(_frame(5)) == slots[0]
    assert reader.taken_count == 3


def test_a_free_slot_does_not_help_a_cancelled_writer(writer: FrameRing, reader: FrameRing) -> None:
    writer.cancel()
    with pytest.raises(RingCancelledError):
        writer.write(_frame(1))
    assert reader.taken_count == 0


def test_recover_frees_what_a_dead_writer_held(reader: FrameRing) -> None:
    writer = FrameRing.attach(reader.handle)
    told = writer.write(_frame(1))
    reader.claim(told)
    writer.handle.free.acquire()
    writer._buffer[1] = SlotState.WRITING
    writer.handle.free.acquire()  # died between the wait and the first byte
    reader.recover()
    assert np.array_equal(reader.read(told), _frame(1))
    assert sorted([writer.write(_frame(2)), writer.write(_frame(3))]) == [1, 2]
    assert not writer.handle.free.acquire(block=False)
    writer.close()


def test_recover_frees_frames_that_the_reader_will_not_hear_of(
    writer: FrameRing, reader: FrameRing
) -> None:
    for value in range(3):
        writer.write(_frame(value))
    reader.recover()
    assert reader.taken_count == 0
    assert len({writer.write(_frame(value)) for value in range(3)}) == 3


@pytest.mark.parametrize("call", ["claim", "read", "release"])
def test_an_empty_slot_is_refused(reader: FrameRing, call: str) -> None:
    with pytest.raises(StateError, match="slot 2 is FREE; expected READY, READING"):
        getattr(reader, call)(2)


@pytest.mark.parametrize(
    "frame",
    [np.zeros((4, 9, 3), np.uint8), np.zeros((4, 8, 3), np.float32)],
    ids=["shape", "type"],
)
def test_another_frame_is_refused(writer: FrameRing, frame: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"allowed: uint8 \(4, 8, 3\)"):
        writer.write(frame)
    assert writer.taken_count == 0
