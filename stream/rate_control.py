"""Bit rate by what the links carry: the player's link sets it, slow spectators get half of it.

Owns the rules for stepping down and up, and who gets the second encoder. Pure: the monotonic clock
is an argument. Invariants: a spectator never changes the player's bit rate; a session has at most
`ENCODER_LIMIT` video encoders.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from stream.video_encoder import BITRATE_RANGE_BPS, Codec

TIGHT_SHARE = 0.8
"""A link is tight whose estimate is below this share of the bit rate."""
TIGHT_S = 3.0
"""So long before anything is done about it."""
STEP_DOWN = 0.75
STEP_DOWN_MIN_S = 5.0
STEP_UP = 1.1
CLEAN_S = 15.0
FLOOR_SHARE = 0.2
"""Of the wanted bit rate: 0.8 of 4 Mb/s, below which 720p is not worth watching."""
MISSED_SHARE = 0.2
"""A link is tight that had no room for this share of the recent frames."""
WINDOW_S = 3.0
"""What counts as recent."""
ESTIMATE_LIFE_S = 2.5
"""Receivers tell about once a second; one word alone is none that lasts."""
RETURN_SHARE = 0.7
"""A receiver raises its estimate to 1.5 times what comes in at most: from half the bit rate that is
0.75 of the whole, and no reason to stay at half."""
RETURN_USE = 0.6
"""From this share of the estimate on the link is used, and the estimate is no matter of what comes
in alone."""
RETURN_LIMIT_S = 240.0
ENCODER_LIMIT = 2

Role = Literal["player", "spectator", "recording"]


class Link:
    """What is known of the way to one viewer."""

    def __init__(self) -> None:
        self.remb_bps: int | None = None
        """The receiver's newest estimate of what its link carries."""
        self.rtt_s: float | None = None
        self._estimated_s = 0.0
        self._frames: deque[tuple[float, int | None]] = deque()

    def note_estimate(self, remb_bps: int, now_s: float) -> None:
        """The receiver told how much its link carries."""
        self.remb_bps = remb_bps
        self._estimated_s = now_s

    def note_frame(self, size_bytes: int | None, now_s: float) -> None:
        """A frame of this size was sent, or with None: there was no room for it."""
        self._frames.append((now_s, size_bytes))
        while self._frames[0][0] < now_s - WINDOW_S:
            self._frames.popleft()

    def is_tight(
        self, bitrate_bps: float, now_s: float, *, share: float = TIGHT_SHARE, use: float = 1.0
    ) -> bool:
        """Whether the link does not carry this bit rate.

        An estimate counts only where this much of it is used: a receiver cannot see more of its
        link than it gets, and a world that stands still sends little.

        Args:
            bitrate_bps: that the link should carry.
            now_s: clock.
            share: of the bit rate that an estimate has to reach.
            use: share of the estimate that has to be sent for it to count.
        """
        recent = [size for at_s, size in self._frames if at_s >= now_s - WINDOW_S]
        missed = sum(size is None for size in recent)
        if missed > MISSED_SHARE * len(recent):
            return True
        if self.remb_bps is None or now_s - self._estimated_s > ESTIMATE_LIFE_S:
            return False
        sent_bps = 8 * sum(size or 0 for size in recent) / WINDOW_S
        return self.remb_bps < share * bitrate_bps and sent_bps > use * self.remb_bps


@dataclass(slots=True)
class Feed:
    """A viewer as media sees it, whichever way it gets its frames."""

    role: Role
    link: Link = field(default_factory=Link)
    is_half: bool = False
    """Gets half the bit rate, from the second encoder."""
    tight_since_s: float | None = None
    clean_since_s: float | None = None
    return_s: float = CLEAN_S
    """How long the link has to be clean before the whole bit rate is tried again."""
    epoch: int | None = None
    """Of the newest picture that went to it."""


class RateControl:
    """The bit rate of one session.

    Args:
        wanted_bps: never more than this.
    """

    def __init__(self, wanted_bps: int) -> None:
        self.bitrate_bps = wanted_bps
        self._wanted_bps = wanted_bps
        self._floor_bps = max(BITRATE_RANGE_BPS[0], round(FLOOR_SHARE * wanted_bps))
        self._nobody = Feed(role="player")
        self._stepped_s = float("-inf")

    @property
    def half_bps(self) -> int:
        """Bit rate of the second encoder."""
        return max(BITRATE_RANGE_BPS[0], self.bitrate_bps // 2)

    def update(self, feeds: Iterable[tuple[Feed, Codec]], now_s: float) -> None:
        """Decide anew; call it about once a second.

        Args:
            feeds: of every viewer with a codec that builds on earlier pictures, and that codec.
            now_s: clock.
        """
        known = list(feeds)
        self._lead(next((feed for feed, _ in known if feed.role == "player"), None), now_s)
        spare = ENCODER_LIMIT - len({codec for feed, codec in known if not feed.is_half})
        halved = {codec for feed, codec in known if feed.is_half}
        for feed, codec in known:
            if feed.role != "spectator":
                continue
            has_encoder = len(halved | {codec}) <= spare
            if feed.is_half and has_encoder:
                self._maybe_return(feed, now_s)
            elif feed.is_half:
                feed.is_half, feed.clean_since_s = False, None
            elif has_encoder and self._halves(feed, now_s):
                halved.add(codec)

    def _lead(self, player: Feed | None, now_s: float) -> None:
        """The player's link sets the bit rate; where nobody plays by video, it goes up again."""
        is_tight = player is not None and player.link.is_tight(self.bitrate_bps, now_s)
        feed = player or self._nobody
        _note(feed, is_tight, now_s)
        if (
            _lasts(feed.tight_since_s, TIGHT_S, now_s)
            and now_s - self._stepped_s >= STEP_DOWN_MIN_S
        ):
            self._step(max(self._floor_bps, round(STEP_DOWN * self.bitrate_bps)), now_s)
        elif _lasts(feed.clean_since_s, CLEAN_S, now_s) and now_s - self._stepped_s >= CLEAN_S:
            self._step(min(self._wanted_bps, round(STEP_UP * self.bitrate_bps)), now_s)

    def _step(self, bitrate_bps: int, now_s: float) -> None:
        if bitrate_bps != self.bitrate_bps:
            self.bitrate_bps = bitrate_bps
            self._stepped_s = now_s

    def _halves(self, feed: Feed, now_s: float) -> bool:
        """Give a spectator half the bit rate if its link has been tight for long; says whether."""
        _note(feed, feed.link.is_tight(self.bitrate_bps, now_s), now_s)
        if _lasts(feed.tight_since_s, TIGHT_S, now_s):
            feed.is_half = True
            feed.tight_since_s, feed.clean_since_s = None, now_s
        return feed.is_half

    def _maybe_return(self, feed: Feed, now_s: float) -> None:
        _note(
            feed,
            feed.link.is_tight(self.bitrate_bps, now_s, share=RETURN_SHARE, use=RETURN_USE),
            now_s,
        )
        if _lasts(feed.clean_since_s, feed.return_s, now_s):
            feed.is_half = False
            feed.clean_since_s = None
            feed.return_s = min(2 * feed.return_s, RETURN_LIMIT_S)


def _note(feed: Feed, is_tight: bool, now_s: float) -> None:
    if is_tight:
        feed.tight_since_s = now_s if feed.tight_since_s is None else feed.tight_since_s
        feed.clean_since_s = None
    else:
        feed.tight_since_s = None
        feed.clean_since_s = now_s if feed.clean_since_s is None else feed.clean_since_s


def _lasts(since_s: float | None, least_s: float, now_s: float) -> bool:
    return since_s is not None and now_s - since_s >= least_s
