"""What the service does when a chunk, memory or the network is not as it should be."""

import datetime
import ssl
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from stream import chunk_watch, memory
from stream.memory import MemoryWatch
from stream.supervisor import WatchdogLimits
from tests.stream.live_service import START_LIMIT_S, Client, Service, running

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    """A service whose chunks may take two seconds."""
    with running(
        grace_s=0.5, watchdog=WatchdogLimits(chunk_s=2.5, backoff_first_s=0.05)
    ) as service:
        yield service


def test_slow_chunk_is_said_and_one_without_end_fails_the_session(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_watch, "SLOW_MS", 500.0)
    client = Client.hello(service, prompt="hang 2")
    client.play()
    client.until("warn", code="SLOW")
    assert client.until("err", fatal=True)["code"] == "GEN_TIMEOUT"
    assert client.until("bye")["resume"] is False
    assert client.close_code() == 4500
    again = Client.hello(service)
    again.play()
    again.until_frames(3)
    again.close()
    assert service.live.registry.illegal_count == 0


def test_too_little_memory_refuses_visitors_then_drains_and_gives_memory_back(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "DRAIN_AFTER_S", 1.5)
    client = Client.hello(service)
    client.play()
    worker = service.live.workers.seats[0].worker
    pid = worker.pid
    service.live._memory = MemoryWatch(1, None)
    service.wait(lambda: service.request("GET", "/readyz")[0] == 503, "it is full")
    status, refusal = service.request("POST", "/v1/sessions", {})
    assert (status, refusal["code"]) == (503, "NOT_READY")
    assert service.state(client.made["session_id"]) == "RUNNING"
    client.until("state", state="DRAINING")
    assert client.close_code() == 1013
    service.wait(lambda: worker.pid not in (pid, None), "the worker is another one")
    service.live._memory = MemoryWatch(None, None)
    service.wait(lambda: service.request("GET", "/readyz")[0] == 200, "it is ready again")


def test_visitor_who_leaves_and_returns_while_it_loads_plays() -> None:
    with running(is_waited_for=False) as service:
        client = Client.hello(service)
        client.until("state", state="WARMING")
        client.close()
        session_id = client.made["session_id"]
        service.wait(lambda: service.state(session_id) == "GRACE", "the loss is noticed")
        again = Client.hello(service, service.create(resume=client.made["resume_token"]))
        again.until("state", state="WARMING")
        limit_s = time.monotonic() + START_LIMIT_S
        while service.state(session_id) == "WARMING" and time.monotonic() < limit_s:
            again.step(START_LIMIT_S)
        again.send(t="media", transport="ws", codec="jpeg")
        again.act("KeyW")
        again.until_frames(3)
        again.close()
        assert service.live.registry.illegal_count == 0


def test_page_of_an_allowed_origin_may_read(service: Service) -> None:
    with running(allowed_origins="https://example.org", is_waited_for=False) as other:
        for origin, allowed in (
            ("https://example.org", "https://example.org"),
            ("https://x", None),
        ):
            request = urllib.request.Request(other.base + "/healthz", headers={"Origin": origin})
            with urllib.request.urlopen(request) as answer:
                assert answer.headers["access-control-allow-origin"] == allowed


def _certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate that 127.0.0.1 signed itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now)
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    cert_path, key_path = folder / "cert.pem", folder / "key.pem"
    cert_path.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    key_path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return cert_path, key_path


def test_service_speaks_tls(tmp_path: Path) -> None:
    cert, key = _certificate(tmp_path)
    with running(tls_cert=str(cert), tls_key=str(key), is_waited_for=False) as service:
        trusting = ssl.create_default_context(cafile=str(cert))
        url = f"https://localhost:{service.port}/healthz"
        with urllib.request.urlopen(url, context=trusting) as answer:
            assert answer.status == 200
