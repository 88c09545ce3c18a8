"""`worldstream serve` in a process of its own, for `bench live`.

Owns the process, its port, its readiness, the reading of its metrics, and what each side takes.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from prometheus_client.parser import text_string_to_metric_families

from engine.errors import DeviceError
from stream.processes import Usage, descendants, machine_cpu_s, usage

VIEWERS_LIMIT = 8
READY_LIMIT_S = 180.0
END_LIMIT_S = 15.0
_ROOT = Path(__file__).resolve().parent.parent


class ServiceProcess:
    """`worldstream serve` in a process of its own."""

    def __init__(self, preset: str, output: IO[bytes]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.base = f"http://127.0.0.1:{port}"
        self._output = output
        self._begin_s = time.monotonic()
        environment = dict(os.environ)
        environment["WORLDSTREAM_SOCKETS_PER_ADDRESS"] = str(2 + VIEWERS_LIMIT)
        environment["WORLDSTREAM_MAX_VIEWERS"] = str(VIEWERS_LIMIT)
        command = [sys.executable, "-m", "stream.cli", "serve", "--preset", preset]
        if preset == "tiny":
            command += ["--weights", "random"]
        self.process = subprocess.Popen(
            [*command, "--port", str(port)],
            # The package that runs here is the one that is measured.
            cwd=_ROOT,
            env=environment,
            stdout=output,
            stderr=output,
        )

    def wait_until_ready(self) -> float:
        """Seconds from the start until visitors can play.

        Raises:
            DeviceError: it ended, or took too long.
        """
        while time.monotonic() - self._begin_s < READY_LIMIT_S:
            if self.process.poll() is not None:
                raise DeviceError(f"serve: it ended at once: {self._last_words()}")
            try:
                self.read("/readyz")
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.05)
            else:
                return time.monotonic() - self._begin_s
        raise DeviceError(f"serve: not ready after {READY_LIMIT_S:.0f} s: {self._last_words()}")

    def read(self, path: str) -> str:
        """Text of a path."""
        with urllib.request.urlopen(self.base + path, timeout=10.0) as answer:
            return bytes(answer.read()).decode()

    def metrics(self) -> dict[str, float]:
        """Every metric, summed over its labels."""
        sums: dict[str, float] = {}
        for family in text_string_to_metric_families(self.read("/metrics")):
            for sample in family.samples:
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
        return sums

    def workers(self) -> list[int]:
        """Processes of the model."""
        found = descendants(self.process.pid)
        return [pid for pid, command in found.items() if "spawn_main" in command]

    def end(self) -> None:
        """Stop it as a terminal does."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _last_words(self) -> str:
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "it said nothing")


@contextmanager
def running(preset: str) -> Iterator[ServiceProcess]:
    """A service on a free port of this machine, until the end of the block."""
    with tempfile.TemporaryFile() as output:
        service = ServiceProcess(preset, output)
        try:
            yield service
        finally:
            service.end()


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What each side took until now."""

    server: Usage
    worker: Usage
    browser: Usage
    machine_cpu_s: float

    @classmethod
    def now(cls, service: ServiceProcess) -> Load:
        """Look at the processes of the service and at the browser that this process started."""
        workers = service.workers()
        own = {service.process.pid, *descendants(service.process.pid)}
        others = descendants(os.getpid())
        browsers = [pid for pid, command in others.items() if "chrom" in command.split(" ")[0]]
        return cls(
            server=usage([service.process.pid]),
            worker=usage(workers),
            browser=usage(set(browsers) - own),
            machine_cpu_s=machine_cpu_s(),
        )
