"""A TURN server on this machine that takes TCP only, for tests; its users expire."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from stream.ice_servers import parse_ice_server, with_user
from stream.protocol import IceServer

START_S = 20.0

needs_coturn = pytest.mark.skipif(
    shutil.which("turnserver") is None, reason="coturn is not installed"
)


@dataclass(frozen=True)
class Relay:
    """Where it is, and what it shares with those who make its users."""

    url: str
    secret: str

    def user(self) -> IceServer:
        """The server with a user that is good for a minute."""
        return with_user(parse_ice_server(self.url), self.secret, time.time() + 60)


@contextmanager
def turn_relay(folder: Path) -> Iterator[Relay]:
    """A relay until the end of the block; `folder` takes its files."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    relay = Relay(url=f"turn:127.0.0.1:{port}?transport=tcp", secret="north")
    command = ["turnserver", "-n", "--no-udp", "--no-tls", "--no-dtls", "--no-cli"]
    command += ["--listening-ip=127.0.0.1", f"--listening-port={port}", "--relay-ip=127.0.0.1"]
    command += ["--use-auth-secret", f"--static-auth-secret={relay.secret}", "--realm=test"]
    command += ["--allow-loopback-peers", f"--pidfile={folder / 'turn.pid'}"]
    command += ["--log-file=stdout", "--no-stdout-log", f"--userdb={folder / 'turn.db'}"]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder
    )
    try:
        _wait_for(port)
        yield relay
    finally:
        process.terminate()
        process.wait(10)


def _wait_for(port: int) -> None:
    end_s = time.monotonic() + START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 0.2).close()
            return
        except OSError:
            assert time.monotonic() < end_s, "the relay starts"
            time.sleep(0.05)
