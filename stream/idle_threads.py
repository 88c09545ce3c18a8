"""How long idle OpenMP threads spin before they sleep.

Owns the two counts and when each serves. Must run before torch is loaded, in this process or in one
that it starts; what the user set stays.
"""

import os

SHARED_SPIN_COUNT = 2_000
"""Some 40 us, for cores that others want as well. With the library's own count (milliseconds) a
chunk of `mini` on 2 cores takes 2,000 to 7,500 ms as soon as a video encoder or a second session
wants a core; so it takes 820 to 1,240, and 370 instead of 350 on an idle machine."""

LONE_SPIN_COUNT = 200_000
"""For one world that is played in a browser on the same 2 cores. The page wakes for some 10 ms a
frame, and threads that sleep between two operations then wait for each other: a chunk took 700 to
850 ms in four runs, 580 and 650 with this count; a key to the screen 940 to 1,090 ms, 810 and
910 with it."""


def set_spin_count(count: int) -> None:
    """Let idle threads spin `count` times, unless the environment already says how they wait."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(count))
