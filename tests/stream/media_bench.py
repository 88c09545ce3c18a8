"""Media under test: a source of frames, viewers by WebSocket, a log of what is told."""

import asyncio
import struct

import numpy as np
from aiortc import RTCConfiguration, RTCPeerConnection

from stream import aiortc_access
from stream.frames import FrameMeta
from stream.media import Media
from stream.media_events import MediaEvents, MediaSettings
from stream.peer import IceSettings
from stream.video_encoder import Codec

WIDTH, HEIGHT, FPS = 64, 48, 120.0
"""A fast clock, for tests that wait for frames."""
FRAMES = 17


class Log(MediaEvents):
    """What media told."""

    def __init__(self):
        self.chunks, self.states, self.encoded, self.keys = [], [], [], []
        self.delivered = []

    def on_chunk(self, notice):
        self.chunks.append(notice)

    def on_peer_state(self, viewer_id, gen, state):
        self.states.append((viewer_id, gen, state))

    def on_encoded(self, codec, encode_ms, size_bytes, key_cause):
        self.encoded.append(codec)
        if key_cause is not None:
            self.keys.append(key_cause)

    def on_delivered(self, transport, is_sent):
        self.delivered.append((transport, is_sent))


class Bench:
    """Media under test with a source of frames."""

    def __init__(self, *, fps=FPS, **settings):
        self.log = Log()
        values = {"ice": IceSettings(hosts=("127.0.0.1",)), "repeat_s": 30.0}
        self.media = Media(
            WIDTH, HEIGHT, fps, MediaSettings(**(values | settings)), events=self.log
        )
        self.media.start()
        self.count = 0
        self.released = []

    def publish(self, count=1, *, epoch=0):
        for _ in range(count):
            index = self.count
            self.count += 1
            meta = FrameMeta(
                frame_id=index + 1,
                epoch=epoch,
                chunk=index // FRAMES,
                act_seq=index // FRAMES,
                latch_ms=0.0,
                ready_ms=0.0,
                offset=index % FRAMES,
            )
            pixels = np.full((HEIGHT, WIDTH, 3), (index * 5) % 256, np.uint8)
            self.media.publish(pixels, meta, lambda i=index + 1: self.released.append(i))

    async def drain(self):
        """Wait until every frame that was published has left or was dropped."""
        async with asyncio.timeout(20):
            while len(self.released) < self.count:
                await asyncio.sleep(0.005)
            # The last one may still be with the encoder; what is said then is said after it.
            thread = self.media._encoders._thread
            await asyncio.get_running_loop().run_in_executor(thread, lambda: None)
            await asyncio.sleep(0.01)


class Reader:
    """A WebSocket viewer that acknowledges at once, later, or never."""

    def __init__(self, bench, name, codec=Codec.H264, *, acknowledges=True, role="player"):
        self.got = []
        self.acknowledges = acknowledges
        self._media, self._name = bench.media, name
        bench.media.audience.add_ws(name, codec, self._take, lambda: 0, role=role)

    @property
    def ids(self):
        return [struct.unpack_from("<I", each, 4)[0] for each in self.got]

    @property
    def keys(self):
        return [frame_id for frame_id, each in zip(self.ids, self.got, strict=True) if each[2] & 1]

    def _take(self, data):
        self.got.append(data)
        if self.acknowledges:
            self._media.audience.acknowledge(self._name, self.ids[-1])
        return True


async def new_offer():
    pc = RTCPeerConnection(RTCConfiguration(iceServers=[]))
    transceiver = pc.addTransceiver("video", direction="recvonly")
    aiortc_access.bind_candidates(transceiver, hosts=("127.0.0.1",), ports=None)
    await pc.setLocalDescription(await pc.createOffer())
    return pc


async def wait_for(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


def run(check, **settings):
    """Run `check(bench)` and see that nothing of it is left.

    `settings` are those of media, and `fps`.
    """

    async def guarded():
        bench = Bench(**settings)
        await check(bench)
        await bench.media.close()
        await asyncio.sleep(0.05)
        assert not asyncio.all_tasks() - {asyncio.current_task()}
        assert sorted(bench.released) == list(range(1, bench.count + 1))

    asyncio.run(guarded())
