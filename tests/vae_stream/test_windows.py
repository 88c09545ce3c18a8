"""Which windows the pictures of a stream come from."""

from __future__ import annotations

import pytest

from vae_stream.geometry import first_frame
from vae_stream.windows import BlockPart, block_parts, window_count, window_slots, windows

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize(
    ("latents", "count"), [(1, 1), (2, 1), (3, 1), (7, 1), (8, 2), (12, 2), (13, 3), (37, 7)]
)
def test_a_stream_has_as_many_windows_as_the_released_code_makes(latents: int, count: int) -> None:
    assert window_count(latents) == count


def test_slots_past_the_end_repeat_the_last_latent() -> None:
    assert window_slots(0, 1) == (0,) * 7
    assert window_slots(1, 8) == (5, 6, 7, 7, 7, 7, 7)
    assert window_slots(1, 20) == (5, 6, 7, 8, 9, 10, 11)


@pytest.mark.parametrize("end", range(1, 41))
def test_parts_have_all_pictures_once(end: int) -> None:
    parts = block_parts(0, end)

    assert sum(part.frames.stop - part.frames.start for part in parts) == first_frame(end)
    assert windows(parts) == tuple(range(window_count(end)))
    # Without a window of its own a block has the 5 pictures of the window before, at most.
    assert all(part.own is not None or part.frames.stop <= 5 for part in parts)


def test_a_latent_needs_one_window_and_a_block_two() -> None:
    assert [windows(block_parts(n, n + 1)) for n in range(10, 15)] == [(1,), (1,), (2,), (2,), (2,)]
    assert windows(block_parts(10, 15)) == (1, 2)
    assert block_parts(10, 11) == (BlockPart(own=None, before=1, frames=slice(0, 1)),)
    assert block_parts(12, 13) == (BlockPart(own=2, before=None, frames=slice(5, 9)),)
