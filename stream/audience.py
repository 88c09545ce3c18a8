"""Audience of one session: the WebRTC connections, WebSockets and the recording that get frames.

Owns the connections of each viewer and their generations. Does not own pacing or encoders.
Invariants: a viewer's old connection goes on until its new one stands; whatever a viewer had is
freed when it leaves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import structlog

from stream.media_events import MediaEvents, MediaSettings
from stream.peer import Answer, OfferError, Peer, PeerEvents
from stream.rate_control import Feed, Role
from stream.recording import Recording
from stream.shared_encoders import Stream, Viewer, stream_of
from stream.video_encoder import Codec, KeyCause
from stream.ws_video import WsVideo

log = structlog.get_logger(__name__)


class Audience:
    """Everybody who gets the frames of one session.

    Args:
        settings: what the operator chose.
        events: is told what happens.
        on_joined: a viewer waits for its first picture.
        on_keyframe: a viewer of this stream needs a keyframe.
        period_s: time between frames.
        clock_s: monotonic.
    """

    def __init__(
        self,
        settings: MediaSettings,
        events: MediaEvents,
        *,
        on_joined: Callable[[], None],
        on_keyframe: Callable[[Stream, KeyCause], None],
        period_s: float,
        clock_s: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._events = events
        self._on_joined = on_joined
        self._on_keyframe = on_keyframe
        self._period_s = period_s
        self._clock_s = clock_s
        self._peers: dict[tuple[str, int], Peer] = {}
        self._newest_gen: dict[str, int] = {}
        self._ws: dict[str, WsVideo] = {}
        self._recording: Recording | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._is_closed = False

    @property
    def viewers(self) -> list[Viewer]:
        """All of them, those whose connection does not stand yet included."""
        viewers: list[Viewer] = [peer.track for peer in self._peers.values()]
        viewers += self._ws.values()
        return viewers if self._recording is None else [*viewers, self._recording]

    @property
    def webrtc_count(self) -> int:
        """WebRTC connections that stand."""
        return sum(peer.state == "connected" for peer in self._peers.values())

    @property
    def ws_count(self) -> int:
        """Viewers by WebSocket."""
        return len(self._ws)

    # ---- coming, going

    async def add_webrtc(
        self,
        viewer_id: str,
        gen: int,
        offer_sdp: str,
        *,
        codecs: Sequence[Codec] = (Codec.H264, Codec.VP8),
        role: Role = "player",
    ) -> Answer:
        """Answer an offer. What the viewer has now goes on until the new connection stands.

        Raises:
            OfferError: if the offer cannot be used, or another overtook it.
        """
        if self._is_closed or gen <= self._newest_gen.get(viewer_id, -1):
            raise OfferError("BAD_MESSAGE", f"gen {gen} is not newer")
        self._newest_gen[viewer_id] = gen
        is_player = role == "player"
        settings = self._settings
        peer = Peer(
            settings.ice,
            Feed(role=role),
            _PeerWatch(self, viewer_id, gen),
            playout_ms=settings.player_playout_ms if is_player else settings.spectator_playout_ms,
            clock_s=self._clock_s,
        )
        try:
            answer = await peer.answer(offer_sdp, codecs)
            if self._newest_gen.get(viewer_id) != gen:
                raise OfferError("RTC_FAILED", "the viewer left or sent a newer offer")
        except BaseException:  # cancellation too: a half-made connection must not stay
            self._close_later(peer)
            raise
        self._peers[viewer_id, gen] = peer
        return answer

    async def add_candidate(
        self, viewer_id: str, gen: int, candidate: str, mid: str | None, mline: int | None
    ) -> None:
        """Take one more ICE candidate; those of connections that are gone are passed over.

        Raises:
            OfferError: if it is malformed, or one too many.
        """
        peer = self._peers.get((viewer_id, gen))
        if peer is not None:
            await peer.add_candidate(candidate, mid, mline)

    def add_ws(
        self,
        viewer_id: str,
        codec: Codec,
        send: Callable[[bytes], bool],
        take_back: Callable[[], int],
        *,
        role: Role = "player",
    ) -> None:
        """Send video over a WebSocket from now on; the viewer's WebRTC connections end.

        `send` takes one binary message, returns at once, and says whether it will go out;
        `take_back` drops those that have not gone out yet, and says how many.
        """
        self._drop_peers(viewer_id, before_gen=None)
        self._newest_gen.setdefault(viewer_id, -1)
        self._ws[viewer_id] = WsVideo(
            codec,
            Feed(role=role),
            send,
            take_back,
            period_s=self._period_s,
            clock_s=self._clock_s,
        )
        self._on_joined()

    def remove(self, viewer_id: str) -> None:
        """Forget a viewer; its connections close in the background."""
        self._newest_gen.pop(viewer_id, None)
        self._ws.pop(viewer_id, None)
        self._drop_peers(viewer_id, before_gen=None)

    def record(self, recording: Recording | None) -> None:
        """Replace the recording; the one before is completed."""
        if self._recording is not None:
            self._recording.finish()
        self._recording = recording

    async def close(self) -> None:
        """End all connections and the recording; may be called twice."""
        self._is_closed = True
        self._ws.clear()
        self._newest_gen.clear()
        for peer in self._peers.values():
            self._close_later(peer)
        self._peers.clear()
        while self._closing:
            await asyncio.gather(*self._closing, return_exceptions=True)
        self.record(None)

    # ---- while they watch

    def acknowledge(self, viewer_id: str, frame_id: int) -> None:
        """A WebSocket viewer has shown or dropped a frame."""
        viewer = self._ws.get(viewer_id)
        if viewer is not None:
            viewer.acknowledge(frame_id)

    def request_keyframe(self, viewer_id: str) -> None:
        """Let this viewer have a keyframe soon."""
        for viewer in self._of(viewer_id):
            self._on_keyframe(stream_of(viewer), KeyCause.CLIENT)

    def dropped_count(self, viewer_id: str) -> int:
        """Frames that this viewer did not get since its first, over its present connections."""
        return sum(viewer.dropped_count for viewer in self._of(viewer_id))

    def discard_before(self, epoch: int) -> None:
        """Drop what waits from older epochs; nothing of this one was sent yet."""
        for peer in self._peers.values():
            peer.track.discard_before(epoch)
        for viewer in self._ws.values():
            viewer.discard()

    def note_frame(self, now_s: float) -> None:
        """A frame is there for everybody: whoever sends nothing for long is helped."""
        for (viewer_id, gen), peer in list(self._peers.items()):
            if peer.state != "connected":
                continue
            peer.watch.offered(now_s)
            remedy = peer.watch.remedy(now_s)
            if remedy is None:
                continue
            log.warning("no_packet_sent", remedy=remedy, gen=gen)
            if remedy == "keyframe":
                peer.track.gate.miss()
                self._on_keyframe(stream_of(peer.track), KeyCause.WATCHDOG)
            else:
                self._events.on_stalled(viewer_id, gen)

    # ---- inside

    def _of(self, viewer_id: str) -> list[Viewer]:
        mine: list[Viewer] = [
            peer.track for (owner, _), peer in self._peers.items() if owner == viewer_id
        ]
        return [*mine, self._ws[viewer_id]] if viewer_id in self._ws else mine

    def _peer_changed(self, viewer_id: str, gen: int, state: str) -> None:
        peer = self._peers.get((viewer_id, gen))
        if state == "connected":
            self._drop_peers(viewer_id, before_gen=gen)
            self._ws.pop(viewer_id, None)
        elif peer is not None:
            del self._peers[viewer_id, gen]
            self._close_later(peer)
        if state != "failed" or self._newest_gen.get(viewer_id) == gen:
            self._events.on_peer_state(viewer_id, gen, state)

    def _drop_peers(self, viewer_id: str, *, before_gen: int | None) -> None:
        for owner, gen in list(self._peers):
            if owner == viewer_id and (before_gen is None or gen < before_gen):
                self._close_later(self._peers.pop((owner, gen)))

    def _close_later(self, peer: Peer) -> None:
        task = asyncio.get_running_loop().create_task(peer.close(), name="peer-close")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


class _PeerWatch(PeerEvents):
    """What a connection tells its audience."""

    def __init__(self, audience: Audience, viewer_id: str, gen: int) -> None:
        self._audience = audience
        self._viewer_id = viewer_id
        self._gen = gen

    def on_started(self) -> None:
        self._audience._on_joined()

    def on_keyframe(self, peer: Peer) -> None:
        self._audience._on_keyframe(stream_of(peer.track), KeyCause.PLI)

    def on_origin(self, origin: int) -> None:
        self._audience._events.on_origin(self._viewer_id, self._gen, origin)

    def on_state(self, state: str) -> None:
        self._audience._peer_changed(self._viewer_id, self._gen, state)

    def on_act(self, text: str | bytes) -> None:
        self._audience._events.on_act(self._viewer_id, text)

    def on_sent(self, send_ms: float) -> None:
        self._audience._events.on_sent(send_ms)
