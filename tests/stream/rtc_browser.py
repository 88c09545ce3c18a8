"""A browser, as far as WebRTC sees: a real peer connection that decodes what it gets.

Also the loss of packets on their way out of a sender of ours.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

from aiortc import RTCConfiguration, RTCPeerConnection, RTCRtpSender, RTCSessionDescription
from aiortc.mediastreams import MediaStreamError, MediaStreamTrack
from aiortc.sdp import SessionDescription

from stream import aiortc_access

HOSTS = ("127.0.0.1",)


class RtcBrowser:
    """Receives one video.

    Args:
        hosts: local addresses.
        configuration: without servers by default.
    """

    def __init__(
        self,
        hosts: tuple[str, ...] | None = HOSTS,
        configuration: RTCConfiguration | None = None,
    ) -> None:
        self.pc = RTCPeerConnection(configuration or RTCConfiguration(iceServers=[]))
        self.frames: list[Any] = []
        self.shown_s: list[float] = []
        """When each frame was decoded, monotonic."""
        self.has_frame = asyncio.Event()
        self._transceiver = self.pc.addTransceiver("video", direction="recvonly")
        self._reader: asyncio.Future[None] | None = None
        self.pc.on("track", self._begin)
        if hosts is not None:
            aiortc_access.bind_candidates(self._transceiver, hosts=hosts, ports=None)

    async def offer(self) -> str:
        """SDP of an offer, candidates included."""
        await self.pc.setLocalDescription(await self.pc.createOffer())
        return self.pc.localDescription.sdp

    async def accept(self, answer: Any) -> None:
        """Take the answer, anything with an `sdp`."""
        await self.pc.setRemoteDescription(RTCSessionDescription(answer.sdp, "answer"))

    async def ask_for_keyframe(self) -> None:
        """Send a PLI."""
        ssrc = SessionDescription.parse(self.pc.remoteDescription.sdp).media[0].ssrc[0].ssrc
        await self._transceiver.receiver._send_rtcp_pli(ssrc)

    async def close(self) -> None:
        """End the connection."""
        await self.pc.close()
        if self._reader is not None:
            await asyncio.gather(self._reader, return_exceptions=True)

    def _begin(self, track: MediaStreamTrack) -> None:
        self._reader = asyncio.ensure_future(self._read(track))

    async def _read(self, track: MediaStreamTrack) -> None:
        try:
            while True:
                self.frames.append(await track.recv())
                self.shown_s.append(time.monotonic())
                self.has_frame.set()
        except MediaStreamError:
            pass


class Dropper:
    """Loses packets of the video on their way out: the next `count_left`, and a share of all."""

    def __init__(self, sender: RTCRtpSender, *, share: float = 0.0) -> None:
        self.count_left = 0
        self.lost_count = 0
        self.share = share
        self._random = random.Random(5)
        self._send = sender.transport._send_rtp
        sender.transport._send_rtp = self._drop_or_send  # type: ignore[method-assign]

    async def _drop_or_send(self, data: bytes) -> None:
        if is_media(data) and (self.count_left or self._random.random() < self.share):
            self.count_left = max(0, self.count_left - 1)
            self.lost_count += 1
        else:
            await self._send(data)


def is_media(data: bytes) -> bool:
    """Whether a packet is RTP, not a report about it (RFC 5761)."""
    return not 64 <= data[1] & 0x7F < 96
