"""Settings: where values come from, what is refused."""

import json
import re
import time

import pytest

from engine.errors import ConfigError
from stream.ice_servers import parse_ice_server, with_user
from stream.settings import load_settings
from stream.workers import spec_of

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


def test_attention_reaches_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLDSTREAM_ATTENTION", "sparse")
    given = {"sparse_tau": "-0.5", "sparse_block": "8", "sparse_steps": "1"}
    engine = spec_of(load_settings(**given)).engine
    assert (engine.attention, engine.sparse_tau, engine.sparse_block) == ("sparse", -0.5, 8)
    assert engine.sparse_steps == 1


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
        ("ice_server", "turn:host:3478"),
        ("media_hosts", "eth0"),
        ("max_sessions", "0"),
        ("ranks", "0"),
        ("ranks", "two"),
        ("attention", "spars"),
        ("sparse_tau", "9"),
        ("sparse_tau", "nan"),
        ("sparse_block", "12"),
        ("sparse_steps", "0"),
        ("sparse_steps", "1.5"),
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


def test_no_part_of_a_password_is_printed() -> None:
    printed = load_settings(ice_server="turn:a:north@south@host:1", token="east").printable()
    assert '"host:1"' in printed
    assert not {"north", "south", "east"} & set(re.findall(r"\w+", printed))


def test_turn_users_of_a_secret_expire_after_the_longest_session() -> None:
    settings = load_settings(
        ice_server="stun:a:1,turn:b:2?transport=tcp", turn_secret="north", max_duration_s=60
    )
    stun, turn = settings.ice_servers
    assert stun.username is None
    assert turn.username is not None
    until_s = int(turn.username.partition(":")[0])
    assert 60 < until_s - time.time() < 3_600


def test_turn_password_is_the_signature_of_its_user() -> None:
    server = with_user(parse_ice_server("turn:host:3478"), "north", 1_433_895_918.0)
    assert server.username == "1433895918:worldstream"
    # printf 1433895918:worldstream | openssl dgst -sha1 -hmac north -binary | base64
    assert server.credential == "v6T8FdXPj/DuExh+Az6WRp0UU1Q="


@pytest.mark.parametrize(
    ("given", "hosts"),
    [
        ({}, ("127.0.0.1",)),
        ({"host": "localhost"}, ("127.0.0.1",)),
        ({"host": "::1"}, ("::1",)),
        ({"host": "0.0.0.0"}, None),
        ({"host": "192.0.2.7"}, ("192.0.2.7",)),
        ({"trusted_proxies": "127.0.0.1"}, None),
        ({"host": "0.0.0.0", "media_hosts": "192.0.2.7,2001:db8::7"}, ("192.0.2.7", "2001:db8::7")),
    ],
)
def test_addresses_of_webrtc_are_those_that_browsers_reach(
    given: dict[str, str], hosts: tuple[str, ...] | None
) -> None:
    assert load_settings(**given).ice_hosts == hosts


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
