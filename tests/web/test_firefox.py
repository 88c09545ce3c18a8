"""The page in Firefox, driven by WebDriver BiDi over a plain WebSocket.

Run by hand: `python -m pytest -m manual tests/web/test_firefox.py`.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("fastapi")

from tests.web.live_page import until

if TYPE_CHECKING:
    from websockets.sync.client import ClientConnection

    from tests.stream.live_service import Service

pytestmark = pytest.mark.manual

FIREFOX = next(filter(None, map(shutil.which, ("firefox", "firefox-esr"))), None)


class Tab:
    """One tab of a Firefox."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self.ask("session.new", capabilities={})
        self._context = self.ask("browsingContext.create", type="tab")["context"]

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Result of a command."""
        number = next(self._ids)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while (answer := json.loads(self._socket.recv(60))).get("id") != number:
            pass
        assert answer["type"] == "success", answer
        return dict(answer["result"])

    def open(self, url: str) -> None:
        self.ask("browsingContext.navigate", context=self._context, url=url, wait="complete")

    def value(self, expression: str) -> Any:
        """Value of a JavaScript expression."""
        target = {"context": self._context}
        found = self.ask("script.evaluate", expression=expression, target=target, awaitPromise=True)
        return found["result"].get("value")

    def press(self, key: str, hold_ms: int) -> None:
        actions = [
            {"type": "keyDown", "value": key},
            {"type": "pause", "duration": hold_ms},
            {"type": "keyUp", "value": key},
        ]
        source = {"type": "key", "id": "keyboard", "actions": actions}
        self.ask("input.performActions", context=self._context, actions=[source])


@pytest.fixture
def tab(tmp_path: Path) -> Iterator[Tab]:
    """Tab of a Firefox with a fresh profile."""
    if FIREFOX is None:
        pytest.skip("no Firefox on this machine")
    client = pytest.importorskip("websockets.sync.client")
    command = [FIREFOX, "--headless", "--no-remote", "--remote-debugging-port=0"]
    words = tmp_path / "words"
    with words.open("w") as file:
        process = subprocess.Popen(
            [*command, "--profile", str(tmp_path), "about:blank"], stderr=file
        )
    try:
        listening = until(lambda: re.search(r"listening on (ws://\S+)", words.read_text()), 60)
        with client.connect(f"{listening[1]}/session", max_size=None) as socket:
            yield Tab(socket)
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.parametrize(
    ("query", "rung"), [("", "webcodecs"), ("?transport=jpeg", "jpeg")], ids=["alone", "jpeg"]
)
def test_page_plays_in_firefox(tab: Tab, service: Service, query: str, rung: str) -> None:
    tab.open(f"{service.base}/{query}")
    until(lambda: tab.value("document.getElementById('overlay').dataset.picture") == "yes")
    assert tab.value("document.body.dataset.rung") == rung
    tab.press("w", 300)
    until(lambda: tab.value("document.body.dataset.state") == "RUNNING")
    until(lambda: int(tab.value("document.getElementById('hud-fps').textContent")) >= 10)
    tab.press("a", 300)
    until(lambda: "p95" in tab.value("document.getElementById('hud-latency').textContent"))
