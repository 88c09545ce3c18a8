"""Where ranks of one machine meet."""

from __future__ import annotations

import socket

import pytest

from engine.ranks import Meeting

pytestmark = pytest.mark.cpu


def test_other_machines_cannot_come_to_the_meeting():
    meeting = Meeting.called(2)
    with socket.create_connection(("127.0.0.1", meeting.port), timeout=5.0):
        pass
    # Another address of this machine: whoever listens to all of them listens to this one too.
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", meeting.port), timeout=5.0)
