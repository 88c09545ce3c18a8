"""One WebRTC connection to one viewer: an offer is answered, encoded video goes out.

Owns the peer connection, its checks, its data channel for actions and its end. Invariants: an
answer comes within `ANSWER_S` or not at all; whatever fails, `close` frees all of it, and may be
called twice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import structlog
from aiortc import (
    RTCConfiguration,
    RTCDataChannel,
    RTCIceServer,
    RTCPeerConnection,
    RTCRtpSender,
    RTCRtpTransceiver,
    RTCSessionDescription,
)
from aiortc.exceptions import InvalidAccessError, InvalidStateError, OperationError
from aiortc.rtcconfiguration import RTCBundlePolicy
from aiortc.sdp import SessionDescription, candidate_from_sdp

from stream import aiortc_access
from stream.protocol import CANDIDATE_LIMIT, SDP_LIMIT
from stream.rate_control import Feed
from stream.send_watch import SendWatch
from stream.video_encoder import Codec
from stream.video_track import VideoTrack

ANSWER_S = 1.0
CONNECT_S = 10.0
CLOSE_S = 2.0
ACT_LABEL = "act"
"""Of the one data channel that a browser may open."""
MIME_TYPES: dict[str, Codec] = {"video/h264": Codec.H264, "video/vp8": Codec.VP8}
H264_PROFILES = ("42e01f", "42001f")
"""In order of preference; Baseline as the encoder makes it."""

OfferErrorCode = Literal["BAD_MESSAGE", "TOO_LARGE", "RTC_CODEC", "RTC_TIMEOUT", "RTC_FAILED"]


class OfferError(Exception):
    """An offer or candidate that cannot be used; other connections are untouched."""

    def __init__(self, code: OfferErrorCode, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code: OfferErrorCode = code
        self.detail = detail
        """For logs only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IceServerSettings:
    """STUN or TURN server, as `RTCIceServer`."""

    urls: tuple[str, ...]
    username: str | None = None
    credential: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class IceSettings:
    """How connections are made."""

    servers: tuple[IceServerSettings, ...] = ()
    hosts: tuple[str, ...] | None = None
    """Local addresses to use; None for those of all interfaces and 127.0.0.1."""
    udp_ports: tuple[int, int] | None = None
    """First and last; None for any."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What goes back to the browser."""

    sdp: str
    codec: Codec


class PeerEvents:
    """What a connection tells; every method is called on the loop and returns at once."""

    def on_started(self) -> None:
        """Media flow and the first picture is wanted."""

    def on_keyframe(self, peer: Peer) -> None:
        """The browser lost pictures and needs a keyframe."""

    def on_origin(self, origin: int) -> None:
        """Once: RTP timestamp less `pts90`, modulo 2**32."""

    def on_state(self, state: str) -> None:
        """The state became "connected", "failed" or "closed", each at most once."""

    def on_act(self, text: str | bytes) -> None:
        """A message came over the data channel."""

    def on_sent(self, send_ms: float) -> None:
        """The last packet of a picture left, so long after it was delivered."""


class Peer:
    """A connection that sends one video track.

    Args:
        settings: addresses, servers, ports.
        feed: of the viewer.
        events: is told what happens.
        playout_ms: shortest and longest time that the browser may hold a picture.
        clock_s: monotonic.
    """

    def __init__(
        self,
        settings: IceSettings,
        feed: Feed,
        events: PeerEvents,
        *,
        playout_ms: tuple[int, int] = (0, 0),
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.track = VideoTrack(
            Codec.H264, feed, on_started=events.on_started, on_sent=self._handle_sent
        )
        self.watch = SendWatch()
        self._settings = settings
        self._events = events
        self._playout_ms = playout_ms
        self._clock_s = clock_s
        self._has_origin = False
        self._channel: RTCDataChannel | None = None
        self._candidate_count = 0
        self._state = "new"
        self._watchdog: asyncio.TimerHandle | None = None
        self._pc = RTCPeerConnection(
            RTCConfiguration(
                iceServers=[
                    RTCIceServer(
                        urls=list(each.urls), username=each.username, credential=each.credential
                    )
                    for each in settings.servers
                ],
                bundlePolicy=RTCBundlePolicy.MAX_BUNDLE,
            )
        )
        self._pc.on("connectionstatechange", self._handle_state)
        self._pc.on("datachannel", self._handle_channel)
        self.track.on("ended", self._handle_ended)
        self._sender: RTCRtpSender | None = None

    @property
    def state(self) -> str:
        """Newest of "new", "connected", "failed", "closed"."""
        return self._state

    async def answer(self, offer_sdp: str, codecs: Sequence[Codec]) -> Answer:
        """Answer an offer with one video section, and at most one for data.

        Args:
            offer_sdp: from the browser, candidates included or to follow.
            codecs: allowed ones of H264 and VP8, the best first.

        Raises:
            OfferError: if the offer is malformed or asks for what is not there, or too slow.
        """
        offer = _checked(offer_sdp)
        transceiver = self._pc.addTransceiver(self.track, direction="sendonly")
        self._sender = transceiver.sender
        aiortc_access.bind_candidates(
            transceiver, hosts=self._settings.hosts, ports=self._settings.udp_ports
        )
        aiortc_access.on_keyframe_request(
            transceiver.sender, lambda: self._events.on_keyframe(self)
        )
        aiortc_access.on_feedback(transceiver.sender, self._handle_feedback)
        _prefer(transceiver, codecs)
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._pc.setRemoteDescription(
                    RTCSessionDescription(sdp=_without_names(offer_sdp), type="offer")
                )
                min_ms, max_ms = self._playout_ms
                video = next(media for media in offer.media if media.kind == "video")
                aiortc_access.set_playout_delay(
                    transceiver,
                    video.rtp.headerExtensions,
                    min_ms=min_ms,
                    max_ms=max_ms,
                )
                await self._pc.setLocalDescription(await self._pc.createAnswer())
        except TimeoutError as error:
            raise OfferError("RTC_TIMEOUT", f"no answer within {ANSWER_S} s") from error
        except OperationError as error:
            raise OfferError("RTC_CODEC", str(error)) from error
        # aiortc's parser and checks raise these for what a browser would not send.
        except (
            ValueError,
            KeyError,
            IndexError,
            TypeError,
            AttributeError,
            AssertionError,
            InvalidAccessError,
            InvalidStateError,
        ) as error:
            raise OfferError("BAD_MESSAGE", repr(error)) from error
        answer_sdp = self._pc.localDescription.sdp
        media = SessionDescription.parse(answer_sdp).media
        if not any(each.ice_candidates for each in media):
            raise OfferError("RTC_FAILED", "no local address or port is free")
        negotiated = next(each for each in media if each.kind == "video").rtp.codecs
        codec = MIME_TYPES.get(negotiated[0].mimeType.lower()) if negotiated else None
        if codec is None or codec not in codecs:
            raise OfferError("RTC_CODEC", f"negotiated {negotiated[:1]}")
        self.track.codec = codec
        self._watchdog = asyncio.get_running_loop().call_later(CONNECT_S, self._give_up)
        return Answer(sdp=answer_sdp, codec=codec)

    async def add_candidate(self, candidate: str, mid: str | None, mline: int | None) -> None:
        """Take one more candidate of the browser; names of the local network are passed over.

        Raises:
            OfferError: if it is malformed, or one too many.
        """
        self._candidate_count += 1
        if self._candidate_count > CANDIDATE_LIMIT:
            raise OfferError("BAD_MESSAGE", f"more than {CANDIDATE_LIMIT} candidates")
        text = candidate.strip().removeprefix("a=").removeprefix("candidate:")
        if not text or ".local " in text or self._state in ("failed", "closed"):
            return
        try:
            parsed = candidate_from_sdp(text)
            parsed.sdpMid, parsed.sdpMLineIndex = mid, mline
            await self._pc.addIceCandidate(parsed)
        except (ValueError, IndexError, AssertionError, InvalidStateError) as error:
            raise OfferError("BAD_MESSAGE", repr(error)) from error

    async def close(self) -> None:
        """End the connection; waits at most `CLOSE_S`."""
        if self._watchdog is not None:
            self._watchdog.cancel()
        self.track.stop()
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._pc.close()
        except TimeoutError:
            structlog.get_logger().warning("peer_close_slow", limit_s=CLOSE_S)
        # aiortc trips over what it had not made yet when it refused an offer.
        except AttributeError as error:
            structlog.get_logger().warning("peer_close_failed", reason=str(error))
        self._enter("closed")

    def _handle_sent(self, pts90: int, send_ms: float) -> None:
        self.watch.sent()
        self._events.on_sent(send_ms)
        if self._has_origin or self._sender is None:
            return
        rtp_time = aiortc_access.rtp_timestamp(self._sender)
        self._has_origin = True
        if rtp_time is not None:
            self._events.on_origin((rtp_time - pts90) % 2**32)

    def _handle_feedback(self, feedback: aiortc_access.Feedback) -> None:
        link = self.track.feed.link
        if feedback.remb_bps is not None:
            link.note_estimate(feedback.remb_bps, self._clock_s())
        if feedback.rtt_s is not None:
            link.rtt_s = feedback.rtt_s
        if feedback.is_beyond_repair:
            self._events.on_keyframe(self)

    def _handle_channel(self, channel: RTCDataChannel) -> None:
        if channel.label != ACT_LABEL or self._channel is not None:
            channel.close()
            return
        self._channel = channel
        channel.on("message", self._events.on_act)

    def _handle_ended(self) -> None:
        """The browser ended the connection, or aiortc's sender gave up."""
        if self._state == "connected":
            self._enter("closed")

    def _handle_state(self) -> None:
        state = self._pc.connectionState
        if state == "connected" and self._watchdog is not None:
            self._watchdog.cancel()
        if state in ("connected", "failed", "closed"):
            self._enter(state)

    def _give_up(self) -> None:
        if self._state == "new":
            self._enter("failed")

    def _enter(self, state: str) -> None:
        if state == self._state or self._state == "closed":
            return
        self._state = state
        self._events.on_state(state)


def _checked(offer_sdp: str) -> SessionDescription:
    if len(offer_sdp) > SDP_LIMIT:
        raise OfferError("TOO_LARGE", f"SDP of {len(offer_sdp)} characters")
    if offer_sdp.count("a=candidate:") > CANDIDATE_LIMIT:
        raise OfferError("BAD_MESSAGE", f"more than {CANDIDATE_LIMIT} candidates")
    try:
        offer = SessionDescription.parse(offer_sdp)
    # The parser has no error of its own and trips over whatever is missing.
    except Exception as error:
        raise OfferError("BAD_MESSAGE", repr(error)) from error
    kinds = [media.kind for media in offer.media]
    if sorted(kinds) not in (["video"], ["application", "video"]):
        raise OfferError(
            "BAD_MESSAGE", f"media sections {kinds}; expected one of video, at most one of data"
        )
    if not all(media.dtls and media.dtls.fingerprints for media in offer.media):
        raise OfferError("BAD_MESSAGE", "no fingerprint")
    return offer


def _without_names(offer_sdp: str) -> str:
    """The offer less candidates that only multicast DNS can resolve, and less their end.

    Resolving them can take longer than the answer may; the browser's own checks reach this side and
    bring its address with them, so that none is needed. More candidates may follow.
    """
    lines = offer_sdp.replace("\r\n", "\n").split("\n")
    kept = [
        line
        for line in lines
        if not (line.startswith("a=candidate:") and ".local " in line)
        and line.strip() != "a=end-of-candidates"
    ]
    return "\r\n".join(kept)


def _prefer(transceiver: RTCRtpTransceiver, codecs: Sequence[Codec]) -> None:
    capabilities = RTCRtpSender.getCapabilities("video").codecs
    chosen = []
    for codec in codecs:
        if codec is Codec.H264:
            for profile in H264_PROFILES:
                chosen += [
                    each
                    for each in capabilities
                    if each.mimeType.lower() == "video/h264"
                    and each.parameters.get("profile-level-id") == profile
                ]
        elif codec is Codec.VP8:
            chosen += [each for each in capabilities if each.mimeType.lower() == "video/vp8"]
    if not chosen:
        raise OfferError("RTC_CODEC", f"none of {list(codecs)} goes over WebRTC")
    chosen += [each for each in capabilities if each.mimeType.lower() == "video/rtx"]
    transceiver.setCodecPreferences(chosen)
