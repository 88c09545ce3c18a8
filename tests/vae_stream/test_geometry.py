"""The clock of latents against frames, by brute force."""

from collections.abc import Callable

import numpy as np
import pytest

from vae_stream.geometry import first_frame, frame_count, latent_of_frame, latents_for_frames

pytestmark = pytest.mark.cpu


def test_a_million_latents_follow_the_repeating_cadence() -> None:
    counts = np.tile([1, 4, 4, 4, 4], 200_000)
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])

    made = np.fromiter(map(first_frame, range(1_000_000)), dtype=np.int64, count=1_000_000)

    assert np.array_equal(made, starts)


def test_each_frame_belongs_to_the_latent_that_emits_it() -> None:
    emitted = [n for n in range(1_000) for _ in range(frame_count(n))]

    assert [latent_of_frame(f) for f in range(len(emitted))] == emitted


@pytest.mark.parametrize(
    ("frames", "latents"), [(0, 0), (1, 1), (2, 2), (17, 5), (18, 6), (192, 57)]
)
def test_latents_for_frames_is_the_least_that_suffices(frames: int, latents: int) -> None:
    assert latents_for_frames(frames) == latents


@pytest.mark.parametrize(
    "function", [first_frame, frame_count, latent_of_frame, latents_for_frames]
)
def test_negative_indices_are_refused(function: Callable[[int], int]) -> None:
    with pytest.raises(ValueError, match="-1; allowed: 0 or more"):
        function(-1)
