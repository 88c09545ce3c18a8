"""Settings: where values come from, what is refused."""

import json

import pytest

from engine.errors import ConfigError
from stream.settings import load_settings, parse_ice_server

pytestmark = pytest.mark.cpu


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PORT", "HOST", "UDP_PORTS", "ICE_SERVER", "TOKEN", "PRESET"):
        monkeypatch.delenv(f"WORLDSTREAM_{name}", raising=False)


def test_option_wins_over_environment_and_environment_over_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert load_settings().port == 8000
    monkeypatch.setenv("WORLDSTREAM_PORT", "9001")
    assert load_settings().port == 9001
    assert load_settings(port="9002").port == 9002


def test_lists_are_written_with_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLDSTREAM_ICE_SERVER", "stun:a:1, turn:me:secret@b:2?transport=tcp")
    monkeypatch.setenv("WORLDSTREAM_UDP_PORTS", "50000-50010")
    settings = load_settings()
    assert [each.urls[0] for each in settings.ice_servers] == ["stun:a:1", "turn:b:2?transport=tcp"]
    assert (settings.ice_servers[1].username, settings.ice_servers[1].credential) == (
        "me",
        "secret",
    )
    assert settings.udp_ports == (50000, 50010)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", "0"),
        ("port", "70000"),
        ("port", "http"),
        ("preset", "huge"),
        ("udp_ports", "5"),
        ("udp_ports", "9000-8000"),
        ("udp_ports", "80-90"),
        ("ice_server", "http://x"),
        ("max_sessions", "0"),
        ("scene", "../x"),
    ],
)
def test_wrong_value_is_refused_in_one_line(name: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(**{name: value})
    assert str(caught.value).startswith(name)
    assert "\n" not in str(caught.value)


def test_turn_server_needs_credentials_and_they_are_not_repeated() -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(ice_server="turn:hunter2@host:3478")
    assert "hunter2" not in str(caught.value)
    assert parse_ice_server("turn:a:b:c@host:1").credential == "b:c"


def test_printed_settings_hold_no_secrets() -> None:
    printed = load_settings(token="hunter2", ice_server="turn:me:hunter3@host:1").printable()
    assert "hunter" not in printed
    assert json.loads(printed)["port"] == 8000


@pytest.mark.parametrize(
    ("host", "is_loopback"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("x.org", False)],
)
def test_loopback_is_known(host: str, is_loopback: bool) -> None:
    assert load_settings(host=host).is_loopback is is_loopback


def test_setting_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLDSTREAM_PROT", "9001")
    with pytest.raises(ConfigError, match="WORLDSTREAM_PROT"):
        load_settings()
    monkeypatch.delenv("WORLDSTREAM_PROT")
    with pytest.raises(ConfigError, match="prot"):
        load_settings(prot=9001)


@pytest.mark.parametrize(
    "given", [{"tls_cert": "cert.pem"}, {"tls_key": "key.pem"}, {"trusted_proxies": "*"}]
)
def test_half_of_a_safe_setting_is_refused(given: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="allowed"):
        load_settings(**given)
