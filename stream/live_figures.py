"""What a page saw, made into figures: frame rate, time from a key to the screen, and its parts.

Owns the arithmetic of `bench live`. Pure: logs go in. Invariants: a latency is the difference of
two times of one clock, the page's; its parts add up to it; the server's clock enters the parts
only.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stream.live_browser import PageLog

PARTS = (
    "input",
    "uplink",
    "wait_for_chunk",
    "generate",
    "decode_latent",
    "queue_ahead",
    "encode",
    "transport",
    "decode_video",
    "display",
)
"""Of the time from a key event to the screen, in order."""
FPS_WINDOW_S = 10.0
PTS_PER_MS = 90.0
RTP_WRAP = 2**32
RTP_TOLERANCE = 45
"""Half a millisecond: times in a picture's metadata may be rounded."""
CHUNKS_IN_FLIGHT = 8
REPEATED = 4
"""Flag of a WebSocket frame that was sent before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """A frame on the screen; times are ms of the page's wall clock."""

    at_ms: float
    frame: int
    pts90: int
    came_ms: float | None
    """Its last byte; None where the browser does not tell, like the next one."""
    decoded_ms: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyToScreen:
    """One press or release and the first frame that shows it."""

    event_ms: float
    total_ms: float
    parts: dict[str, float]


def percentiles(values: Sequence[float]) -> dict[str, float | int]:
    """Count and percentiles; not a number where there are no values."""
    marks = (20, 50, 80, 95, 99)
    found = np.percentile(np.asarray(values), marks) if len(values) else [math.nan] * len(marks)
    named = {f"p{mark}": round(float(value), 1) for mark, value in zip(marks, found, strict=True)}
    return {"n": len(values), **named}


def clock_offset_ms(log: PageLog) -> float:
    """Server clock minus page clock: median over the fastest fifth of the pings."""
    pongs = _pongs(log)
    fastest = pongs[: max(1, len(pongs) // 5)]
    return float(np.median([offset_ms for _, offset_ms in fastest])) if pongs else 0.0


def round_trip_ms(log: PageLog) -> float:
    """Median time of a ping."""
    pongs = _pongs(log)
    return float(np.median([rtt_ms for rtt_ms, _ in pongs])) if pongs else 0.0


def shown_frames(log: PageLog) -> list[Shown]:
    """Frames of chunks in the order in which they were shown; repeated ones once."""
    frames = sorted([*_rtc_frames(log), *_ws_frames(log)], key=lambda shown: shown.at_ms)
    seen: set[int] = set()
    first = []
    for shown in frames:
        if shown.frame not in seen:
            seen.add(shown.frame)
            first.append(shown)
    return first


def first_shown_ms(log: PageLog) -> float | None:
    """When the page had its first picture, that of the scene."""
    drawn = [each.at_ms for each in log.rtp]
    drawn += [
        message["drawn_ct"]
        for _, message in log.sent
        if message["t"] == "ack" and message.get("drawn_ct") is not None
    ]
    return min(drawn, default=None)


def frame_rates(shown: Sequence[Shown], begin_ms: float, end_ms: float) -> list[float]:
    """Frames a second in each full window of `FPS_WINDOW_S`."""
    width_ms = FPS_WINDOW_S * 1e3
    counts = [0] * int((end_ms - begin_ms) // width_ms)
    for each in shown:
        window = math.floor((each.at_ms - begin_ms) / width_ms)
        if 0 <= window < len(counts):
            counts[window] += 1
    return [count / FPS_WINDOW_S for count in counts]


def media_lag_growth_ms(shown: Sequence[Shown]) -> float:
    """How much later frames are shown at the end than at the beginning, by their own times.

    Medians of the first and the last tenth; without meaning for fewer than ten frames.
    """
    lags_ms = [each.at_ms - each.pts90 / PTS_PER_MS for each in shown]
    tenth = max(1, len(lags_ms) // 10)
    return float(np.median(lags_ms[-tenth:]) - np.median(lags_ms[:tenth])) if lags_ms else 0.0


def keys_to_screen(
    log: PageLog, shown: Sequence[Shown], *, encode_ms: float, decode_latent_ms: float
) -> list[KeyToScreen]:
    """Every press and release that a frame showed.

    Args:
        log: of the page.
        shown: its frames.
        encode_ms: mean for one frame; the page cannot see it.
        decode_latent_ms: mean for the first latent of a chunk, likewise.
    """
    offset_ms, uplink_ms = clock_offset_ms(log), round_trip_ms(log) / 2
    chunks = {frame: chunk for chunk in _chunks(log) for frame in _frames_of(chunk)}
    waiting = deque(_actions(log))
    found = []
    for each in shown:
        chunk = chunks.get(each.frame)
        if chunk is None:
            continue
        at = each.frame - chunk["first"]
        seq = max((last for begin, last in chunk.get("act") or () if begin <= at), default=0)
        while waiting and waiting[0].seq <= seq and waiting[0].event_ms < each.at_ms:
            action = waiting.popleft()
            times = chunk["times"]
            due_ms = times["due"] - offset_ms + (each.pts90 - _pts(chunk, 0)) / PTS_PER_MS
            latch_ms = times["latch"][0][1] - offset_ms
            made_ms = times["gen1"] - offset_ms
            came_ms = due_ms + encode_ms if each.came_ms is None else each.came_ms
            decoded_ms = came_ms if each.decoded_ms is None else each.decoded_ms
            marks = (
                action.event_ms,
                action.sent_ms,
                action.sent_ms + uplink_ms,
                latch_ms,
                made_ms - decode_latent_ms,
                made_ms,
                due_ms,
                due_ms + encode_ms,
                came_ms,
                decoded_ms,
                each.at_ms,
            )
            parts = {name: marks[i + 1] - marks[i] for i, name in enumerate(PARTS)}
            found.append(
                KeyToScreen(
                    event_ms=action.event_ms,
                    total_ms=each.at_ms - action.event_ms,
                    parts=parts,
                )
            )
    return found


@dataclass(frozen=True, slots=True)
class _Action:
    seq: int
    event_ms: float
    sent_ms: float


def _actions(log: PageLog) -> Iterator[_Action]:
    """Each press and release with the first snapshot that carried it."""
    newest = 0
    for at_ms, message in log.sent:
        if message["t"] != "act":
            continue
        for number, _, _, event_ms in message["edges"]:
            if number > newest:
                newest = number
                yield _Action(message["seq"], event_ms, at_ms)


def _pongs(log: PageLog) -> list[tuple[float, float]]:
    """(round trip, clock offset), fastest first."""
    return sorted(
        (at_ms - pong["ct"], pong["st"] - (pong["ct"] + at_ms) / 2)
        for at_ms, pong in log.received
        if pong["t"] == "pong"
    )


def _chunks(log: PageLog) -> list[dict[str, Any]]:
    return [message for _, message in log.received if message["t"] == "chunk"]


def _frames_of(chunk: dict[str, Any]) -> range:
    return range(chunk["first"], chunk["first"] + chunk["n"])


def _pts(chunk: dict[str, Any], index: int) -> int:
    listed = chunk.get("pts")
    return int(listed[index] if listed else chunk["pts0"] + index * chunk["dpts"])


def _rtc_frames(log: PageLog) -> Iterator[Shown]:
    """Frames of the video element, named by their timestamps as the protocol says."""
    told = deque(each for each in log.received if each[1]["t"] in ("chunk", "rtc.origin"))
    origin: int | None = None
    recent: dict[int, dict[str, Any]] = {}
    for each in log.rtp:
        while told and told[0][0] <= each.at_ms:
            message = told.popleft()[1]
            if message["t"] == "rtc.origin":
                origin = message["origin"]
                continue
            recent.pop(message["first"], None)
            recent[message["first"]] = message
            if len(recent) > CHUNKS_IN_FLIGHT:
                del recent[next(iter(recent))]
        if origin is None or each.rtp is None:
            continue
        pts90 = (each.rtp - origin) % RTP_WRAP
        frame = next(
            (
                chunk["first"] + index
                for chunk in recent.values()
                for index in range(chunk["n"])
                if abs(_pts(chunk, index) - pts90) <= RTP_TOLERANCE
            ),
            None,
        )
        if frame is None:
            continue
        has_both = each.came_ms is not None and each.decode_ms is not None
        yield Shown(
            at_ms=each.at_ms,
            frame=frame,
            pts90=pts90,
            came_ms=each.came_ms,
            decoded_ms=(each.came_ms or 0.0) + (each.decode_ms or 0.0) if has_both else None,
        )


def _ws_frames(log: PageLog) -> Iterator[Shown]:
    """Frames of the canvas, timed by the reports of the page itself."""
    drawn_ms = {
        message["frame"]: message.get("drawn_ct")
        for _, message in log.sent
        if message["t"] == "ack"
    }
    packets = {each.frame: each for each in log.packets if not each.flags & REPEATED}
    for _, message in log.sent:
        for frame, at_ms in message["frames"] if message["t"] == "shown" else ():
            packet = packets.get(frame)
            if packet is not None:
                yield Shown(
                    at_ms=at_ms,
                    frame=frame,
                    pts90=packet.pts90,
                    came_ms=packet.came_ms,
                    decoded_ms=drawn_ms.get(frame),
                )
