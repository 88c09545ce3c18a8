"""One WebRTC connection to one viewer: an offer is answered, encoded video goes out.

Owns the peer connection, its checks and its end. Invariants: an answer comes within `ANSWER_S` or
not at all; whatever fails, `close` frees all of it, and may be called twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import structlog
from aiortc import (
    RTCConfiguration,
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
from stream.video_encoder import Codec
from stream.video_track import VideoTrack

ANSWER_S = 1.0
CONNECT_S = 10.0
CLOSE_S = 2.0
SDP_LIMIT = 32 * 1024
CANDIDATE_LIMIT = 40
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
    playout_ms: tuple[int, int] = (0, 0)
    """Shortest and longest time that browsers may hold a picture."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What goes back to the browser."""

    sdp: str
    codec: Codec


class Peer:
    """A connection that sends one video track.

    Args:
        settings: addresses, servers, ports.
        on_started: media flow and the first picture is wanted.
        on_keyframe: the browser lost pictures and asks for a keyframe.
        on_origin: called once, with RTP timestamp less `pts90`, modulo 2**32.
        on_state: "connected", "failed" or "closed", each at most once.
    """

    def __init__(
        self,
        settings: IceSettings,
        *,
        on_started: Callable[[], None],
        on_keyframe: Callable[[], None],
        on_origin: Callable[[int], None],
        on_state: Callable[[str], None],
    ) -> None:
        self.track = VideoTrack(Codec.H264, on_started=on_started, on_sent=self._handle_sent)
        self._settings = settings
        self._on_keyframe = on_keyframe
        self._on_origin = on_origin
        self._on_state = on_state
        self._has_origin = False
        self._candidate_count = 0
        self._state = "new"
        self._watch: asyncio.TimerHandle | None = None
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
        self._sender: RTCRtpSender | None = None

    @property
    def state(self) -> str:
        """Newest of "new", "connected", "failed", "closed"."""
        return self._state

    async def answer(self, offer_sdp: str, codecs: Sequence[Codec]) -> Answer:
        """Answer an offer with one video section.

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
        aiortc_access.on_keyframe_request(transceiver.sender, self._on_keyframe)
        _prefer(transceiver, codecs)
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._pc.setRemoteDescription(
                    RTCSessionDescription(sdp=_without_names(offer_sdp), type="offer")
                )
                min_ms, max_ms = self._settings.playout_ms
                aiortc_access.set_playout_delay(
                    transceiver,
                    offer.media[0].rtp.headerExtensions,
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
        negotiated = SessionDescription.parse(answer_sdp).media[0].rtp.codecs
        codec = MIME_TYPES.get(negotiated[0].mimeType.lower()) if negotiated else None
        if codec is None or codec not in codecs:
            raise OfferError("RTC_CODEC", f"negotiated {negotiated[:1]}")
        self.track.codec = codec
        self._watch = asyncio.get_running_loop().call_later(CONNECT_S, self._give_up)
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
        if self._watch is not None:
            self._watch.cancel()
        self.track.stop()
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._pc.close()
        except TimeoutError:
            structlog.get_logger().warning("peer_close_slow", limit_s=CLOSE_S)
        self._enter("closed")

    def _handle_sent(self, pts90: int) -> None:
        if self._has_origin or self._sender is None:
            return
        rtp_time = aiortc_access.rtp_timestamp(self._sender)
        self._has_origin = True
        if rtp_time is not None:
            self._on_origin((rtp_time - pts90) % 2**32)

    def _handle_state(self) -> None:
        state = self._pc.connectionState
        if state == "connected" and self._watch is not None:
            self._watch.cancel()
        if state in ("connected", "failed", "closed"):
            self._enter(state)

    def _give_up(self) -> None:
        if self._state == "new":
            self._enter("failed")

    def _enter(self, state: str) -> None:
        if state == self._state or self._state == "closed":
            return
        self._state = state
        self._on_state(state)


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
    if kinds != ["video"]:
        raise OfferError("BAD_MESSAGE", f"media sections {kinds}; expected one of video")
    if not (offer.media[0].dtls and offer.media[0].dtls.fingerprints):
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
