"""What aiortc does but does not offer: the only place that touches its private parts.

Owns: local addresses and ports of ICE, keyframe requests of packet tracks, what receivers report,
the RTP time of the last packet, the playout-delay header. Each accessor checks what it finds; where
another version of aiortc lacks it, the answer is False or None, a warning is logged once, and the
service goes on without (viewers then join timestamps by themselves, and ask for keyframes over the
WebSocket).
"""

from __future__ import annotations

import asyncio
import errno
import functools
import inspect
import ipaddress
import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog
from aioice import Candidate, Connection, ice
from aioice.candidate import candidate_foundation, candidate_priority
from aiortc import RTCRtpSender, RTCRtpTransceiver, rtp
from aiortc.rtcrtpparameters import (
    RTCRtpHeaderExtensionParameters,
    RTCRtpParameters,
)

PLAYOUT_DELAY_URI = "http://www.webrtc.org/experiments/rtp-hdrext/playout-delay"
PLAYOUT_DELAY_UNIT_MS = 10
LOOPBACK = "127.0.0.1"
GATHER_S = 0.5
"""Longest wait for STUN and TURN servers: the offer has to be answered within a second."""

_RTP_TIME = "_RTCRtpSender__rtp_timestamp"
_RTT = "_RTCRtpSender__rtt"
_HISTORY = "_RTCRtpSender__rtp_history"
_EXTENSION_MAP = "_RTCRtpSender__rtp_header_extensions_map"


@dataclass(frozen=True, kw_only=True, slots=True)
class Feedback:
    """What one report of a receiver says; None where it says nothing about it."""

    remb_bps: int | None = None
    """What the receiver's link carries, by its estimate."""
    rtt_s: float | None = None
    is_beyond_repair: bool = False
    """Packets are missing that cannot be sent again any more."""


def bind_candidates(
    transceiver: RTCRtpTransceiver,
    *,
    hosts: Sequence[str] | None,
    ports: tuple[int, int] | None,
) -> bool:
    """Let ICE use these local addresses and UDP ports only; before the local description is set.

    Args:
        transceiver: any of a connection whose media are bundled.
        hosts: addresses; None for those of all interfaces, IPv4 loopback included.
        ports: first and last; None for any.
    """
    connection = getattr(transceiver.sender.transport.transport.iceGatherer, "_connection", None)
    if not isinstance(connection, Connection) or not hasattr(
        connection, "get_component_candidates"
    ):
        _warn_once("local addresses and ports of ICE")
        return False
    gather = functools.partial(_gather, connection, hosts, ports)
    connection.get_component_candidates = gather  # type: ignore[method-assign]
    return True


def on_keyframe_request(sender: RTCRtpSender, callback: Callable[[], None]) -> bool:
    """Have PLI and FIR call `callback`."""
    if not inspect.isfunction(getattr(RTCRtpSender, "_send_keyframe", None)):
        _warn_once("keyframe requests")
        return False
    sender._send_keyframe = callback  # type: ignore[method-assign]
    return True


def on_feedback(sender: RTCRtpSender, callback: Callable[[Feedback], None]) -> bool:
    """Have each report of the receiver call `callback`, after aiortc acted on it."""
    handle = getattr(sender, "_handle_rtcp_packet", None)
    if not (inspect.iscoroutinefunction(handle) and {_RTT, _HISTORY} <= sender.__dict__.keys()):
        _warn_once("reports of receivers")
        return False

    async def handle_and_tell(packet: rtp.AnyRtcpPacket) -> None:
        await handle(packet)
        callback(_feedback(sender, packet))

    sender._handle_rtcp_packet = handle_and_tell  # type: ignore[method-assign]
    return True


def _feedback(sender: RTCRtpSender, packet: rtp.AnyRtcpPacket) -> Feedback:
    if isinstance(packet, rtp.RtcpRrPacket | rtp.RtcpSrPacket):
        return Feedback(rtt_s=sender.__dict__[_RTT])
    if isinstance(packet, rtp.RtcpRtpfbPacket) and packet.fmt == rtp.RTCP_RTPFB_NACK:
        history = sender.__dict__[_HISTORY]
        return Feedback(is_beyond_repair=any(_is_gone(history, lost) for lost in packet.lost))
    if isinstance(packet, rtp.RtcpPsfbPacket) and packet.fmt == rtp.RTCP_PSFB_APP:
        try:
            remb_bps, ssrcs = rtp.unpack_remb_fci(packet.fci)
        except ValueError:
            return Feedback()
        return Feedback(remb_bps=remb_bps if sender._ssrc in ssrcs else None)
    return Feedback()


def _is_gone(history: dict[int, rtp.RtpPacket], sequence_number: int) -> bool:
    """Whether a packet is not in aiortc's ring of those sent last."""
    packet = history.get(sequence_number % rtp.RTP_HISTORY_SIZE)
    return packet is None or packet.sequence_number != sequence_number


def rtp_timestamp(sender: RTCRtpSender) -> int | None:
    """RTP time of the last packet sent."""
    value = sender.__dict__.get(_RTP_TIME)
    if not isinstance(value, int):
        _warn_once("RTP times")
        return None
    return value


def set_playout_delay(
    transceiver: RTCRtpTransceiver,
    offered: Sequence[RTCRtpHeaderExtensionParameters],
    *,
    min_ms: int,
    max_ms: int,
) -> bool:
    """Send the playout-delay header if the offer has it; between the remote description and answer.

    Args:
        transceiver: of the video.
        offered: header extensions of the offer's video section.
        min_ms: shortest time that the receiver may hold a picture, like `max_ms` in steps of 10.
        max_ms: longest.
    """
    found = next((each for each in offered if each.uri == PLAYOUT_DELAY_URI), None)
    if found is None:
        return False
    extensions = getattr(transceiver, "_headerExtensions", None)
    if not isinstance(extensions, list) or _EXTENSION_MAP not in transceiver.sender.__dict__:
        _warn_once("header extensions")
        return False
    extensions.append(found)
    header_map = PlayoutDelayMap(min_ms=min_ms, max_ms=max_ms)
    setattr(transceiver.sender, _EXTENSION_MAP, header_map)
    return True


class PlayoutDelayMap(rtp.HeaderExtensionsMap):
    """Header extensions of aiortc, and the playout delay on every packet."""

    def __init__(self, *, min_ms: int, max_ms: int) -> None:
        super().__init__()
        steps = (min_ms // PLAYOUT_DELAY_UNIT_MS) << 12 | max_ms // PLAYOUT_DELAY_UNIT_MS
        self._value = struct.pack("!I", steps)[1:]
        self._id: int | None = None

    def configure(self, parameters: RTCRtpParameters) -> None:
        """Learn the negotiated numbers."""
        super().configure(parameters)
        for extension in parameters.headerExtensions:
            if extension.uri == PLAYOUT_DELAY_URI:
                self._id = extension.id

    def set(self, values: rtp.HeaderExtensions) -> tuple[int, bytes]:
        """Profile and bytes of a packet's extensions."""
        profile, packed = super().set(values)
        if self._id is None:
            return profile, packed
        extensions = list(rtp.unpack_header_extensions(profile, packed))
        return rtp.pack_header_extensions([*extensions, (self._id, self._value)])


async def _gather(
    connection: Connection,
    hosts: Sequence[str] | None,
    ports: tuple[int, int] | None,
    component: int,
    addresses: list[str],
    timeout: int = 5,
) -> list[Candidate]:
    """Stand in for `Connection.get_component_candidates`, which takes any port of any address."""
    if hosts is None:
        hosts = (*(each for each in addresses if each != LOOPBACK), LOOPBACK)
    opened: list[ice.StunProtocol] = []
    for host in hosts:
        protocol = await _open(connection, component, host, ports)
        if protocol is not None:
            opened.append(protocol)
            connection._protocols.append(protocol)  # closed with it, whatever happens next
    candidates = [protocol.local_candidate for protocol in opened]
    tasks: list[asyncio.Task[Candidate]] = []
    if connection.stun_server:
        tasks += [
            asyncio.create_task(_reflexive(protocol, connection.stun_server))
            for protocol in opened
            if _is_outward_v4(protocol.local_candidate.host)
        ]
    if connection.turn_server:
        tasks.append(asyncio.create_task(_relayed(connection, component)))
    if tasks:
        try:
            await asyncio.wait(tasks, timeout=min(timeout, GATHER_S))
        finally:
            for task in tasks:
                task.cancel()
            found = await asyncio.gather(*tasks, return_exceptions=True)
        candidates += [each for each in found if isinstance(each, Candidate)]
    return candidates


async def _open(
    connection: Connection, component: int, host: str, ports: tuple[int, int] | None
) -> ice.StunProtocol | None:
    """Socket on a free port of the range, in random order."""
    numbers = [0]
    if ports is not None:
        numbers = list(range(ports[0], ports[1] + 1))
        random.shuffle(numbers)
    loop = asyncio.get_running_loop()
    for number in numbers:
        try:
            transport, protocol = await loop.create_datagram_endpoint(
                lambda: ice.StunProtocol(connection), local_addr=(host, number)
            )
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                continue
            break
        address = transport.get_extra_info("sockname")
        protocol.local_candidate = Candidate(
            foundation=candidate_foundation("host", "udp", address[0]),
            component=component,
            transport="udp",
            priority=candidate_priority(component, "host"),
            host=address[0],
            port=address[1],
            type="host",
        )
        return protocol
    structlog.get_logger().warning("ice_no_port", host=host, ports=ports)
    return None


async def _reflexive(protocol: ice.StunProtocol, server: tuple[str, int]) -> Candidate:
    return (await ice.server_reflexive_candidate(protocol, server))[0]


async def _relayed(connection: Connection, component: int) -> Candidate:
    """Ask the TURN server, which the caller made sure is there."""
    assert connection.turn_server is not None
    candidate, protocol = await ice.relayed_candidate(
        component=component,
        hide_related_address=False,
        protocol_factory=lambda: ice.StunProtocol(connection),
        turn_server=connection.turn_server,
        turn_username=connection.turn_username,
        turn_password=connection.turn_password,
        turn_ssl=connection.turn_ssl,
        turn_transport=connection.turn_transport,
    )
    connection._protocols.append(protocol)
    return candidate


def _is_outward_v4(host: str) -> bool:
    address = ipaddress.ip_address(host)
    return address.version == 4 and not address.is_loopback


@functools.cache
def _warn_once(what: str) -> None:
    structlog.get_logger().warning("aiortc_differs", missing=what)
