"""`worldstream serve`: checks, then the live service until a signal ends it.

Owns what is said in the terminal and the order of ending. Invariants: what can be checked without
the model is checked before it loads; SIGTERM and Ctrl-C tell viewers, then end everything within
seconds.
"""

from __future__ import annotations

import logging
import secrets
import signal
import socket
import ssl
import sys
import time
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI
from pydantic import SecretStr

from engine.config import preset
from engine.errors import CheckpointError, ConfigError, DeviceError
from stream import protocol
from stream.app import create_app
from stream.idle_threads import LONE_SPIN_COUNT, SHARED_SPIN_COUNT, set_spin_count
from stream.jobs import check_writable
from stream.live import Live
from stream.settings import ServerSettings
from stream.workers import spec_of
from stream.world_place import place_world

SHUTDOWN_LIMIT_S = 5
PROGRESS_S = 0.5


class LiveServer(uvicorn.Server):
    """Server that lets the service say goodbye before it closes connections."""

    def __init__(self, config: uvicorn.Config, live: Live) -> None:
        super().__init__(config)
        self._live = live
        self._told = ""
        self._begin_s = time.monotonic()
        self._is_up = self._is_plan_told = False

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: tell the progress of loading."""
        if counter % int(PROGRESS_S * 10) == 0 and not self._is_up:
            self._tell()
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End in order; a second Ctrl-C waits for nothing. The signal is not raised again."""
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Tell viewers, end sessions and workers, then close connections."""
        await self._live.close()
        await super().shutdown(sockets)

    def _tell(self) -> None:
        loading = self._live.workers.loading
        if not self._is_plan_told and self._live.workers.plan_text:
            self._is_plan_told = True
            _say(self._live.workers.plan_text)
        if self._live.is_ready:
            self._is_up = True
            _say(f"ready after {time.monotonic() - self._begin_s:.1f} s")
            print(page_url(self._live.settings), flush=True)
        elif loading is not None:
            text = f"{loading.stage}, {loading.percent:.0f} %"
            if text != self._told:
                self._told = text
                _say(f"{text} ({time.monotonic() - self._begin_s:.1f} s)")


def serve(settings: ServerSettings) -> None:
    """Run the service until SIGTERM or Ctrl-C.

    Raises:
        ConfigError: a setting cannot work here.
        DeviceError: the port is taken, or the worker cannot run.
        CheckpointError: weights are missing.
    """
    settings = with_token(settings)
    check(settings)
    # Workers take it over from here.
    is_lone = settings.max_sessions == settings.ranks == 1
    set_spin_count(LONE_SPIN_COUNT if is_lone else SHARED_SPIN_COUNT)
    listener = bind(settings)
    lost: list[str] = []

    def stop(reason: str) -> None:
        lost.append(reason)
        server.should_exit = True

    for chatty in ("aioice", "aiortc", "uvicorn.error"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    live = Live(settings, on_lost=stop)
    server = LiveServer(uvicorn_config(create_app(live), settings), live)
    _say(f"starting {settings.preset} on {settings.host}:{settings.port}")
    with listener:
        server.run(sockets=[listener])
    if lost:
        raise DeviceError(f"worker: {lost[0]}")


def uvicorn_config(app: FastAPI, settings: ServerSettings) -> uvicorn.Config:
    """Limits of the protocol as the HTTP server wants them."""
    proxies = settings.trusted_proxies
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        ws_max_size=protocol.MESSAGE_LIMIT_BYTES,
        ws_max_queue=32,
        # Who is lost right after an answer is found with the next ping, within `dead_s` in all.
        ws_ping_interval=settings.dead_s / 2.0,
        ws_ping_timeout=settings.dead_s / 2.0,
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
        ws_per_message_deflate=False,
        timeout_graceful_shutdown=SHUTDOWN_LIMIT_S,
        proxy_headers=bool(proxies),
        forwarded_allow_ips=proxies or None,
        server_header=False,
    )


def check(settings: ServerSettings) -> None:
    """Refuse what cannot work, before anything heavy is loaded.

    Raises:
        ConfigError: unknown preset or weights, a folder that takes no files, H.264 missing.
        CheckpointError: weights are missing.
    """
    check_exposure(settings)
    spec = spec_of(settings)
    found = preset(spec.preset)
    if spec.source == "model" and spec.weights != "random":
        folder = found.weights if spec.weights == "shipped" else Path(spec.weights)
        if folder is None or not folder.is_dir():
            raise CheckpointError(f"weights: {folder} is no folder")
    if spec.engine.device == "cpu":  # else it is for the worker to say, which finds the GPUs
        place_world(spec, gpu_count=0)
    if settings.record is not None:
        Path(settings.record).mkdir(parents=True, exist_ok=True)
        check_writable(Path(settings.record), "record")
    import av

    if "libx264" not in av.codecs_available:
        raise ConfigError("codec: this build of PyAV has no libx264; install one that has it")


def check_exposure(settings: ServerSettings) -> None:
    """Refuse to be reached from outside without encryption.

    Raises:
        ConfigError: a public address without TLS or a proxy that has it; TLS files of no use.
    """
    if settings.tls_cert is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(settings.tls_cert, settings.tls_key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"tls_cert: {settings.tls_cert}, tls_key: {settings.tls_key}: {error}; "
                "allowed: PEM files that belong together"
            ) from error
    elif not settings.is_loopback and not settings.trusted_proxies:
        raise ConfigError(
            f"host: other machines can reach {settings.host}, so TLS is needed: --tls-cert and "
            "--tls-key, or --trusted-proxies with the address of a proxy that has it"
        )


def bind(settings: ServerSettings) -> socket.socket:
    """Open the port.

    Raises:
        DeviceError: taken, not allowed, or no such address.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        where = f"{settings.host}:{settings.port}"
        raise DeviceError(f"port: cannot open {where}: {error.strerror or error}") from error
    return listener


def with_token(settings: ServerSettings) -> ServerSettings:
    """Make up an access token where others can reach the service and none was given."""
    if settings.token is not None or not settings.is_public:
        return settings
    return settings.model_copy(update={"token": SecretStr(secrets.token_urlsafe(24))})


def page_url(settings: ServerSettings) -> str:
    """URL to open; a token travels in its fragment, which browsers keep to themselves."""
    is_any = settings.host in ("0.0.0.0", "::")
    host = socket.gethostname() if is_any else settings.host
    host = f"[{host}]" if ":" in host else host
    token = "" if settings.token is None else f"#token={settings.token.get_secret_value()}"
    scheme = "http" if settings.tls_cert is None else "https"
    return f"{scheme}://{host}:{settings.port}/{token}"


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
