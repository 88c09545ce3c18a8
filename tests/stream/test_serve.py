"""`worldstream serve`: what it refuses before anything is loaded, and what it prints."""

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError, DeviceError
from stream import cli
from stream.serve import bind, check, check_exposure, page_url, with_token
from stream.settings import load_settings

pytestmark = pytest.mark.cpu


def test_api_process_never_imports_the_model() -> None:
    code = "import stream.serve, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_sigterm_ends_the_command_cleanly() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "stream.cli", "serve", "--renderer", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().decode() == f"http://127.0.0.1:{port}/\n"
        process.terminate()
        assert process.wait(20.0) == cli.EXIT_OK
        told = process.stderr.read().decode()
    assert "ready after" in told
    assert "leaked" not in told
    assert "Traceback" not in told


@pytest.mark.parametrize("port", ["0", "70000", "http"])
def test_wrong_port_is_bad_usage(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--port", port]) == cli.EXIT_USAGE
    assert capsys.readouterr().err.startswith("error: port: ")


def test_taken_port_is_told_before_anything_loads(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert cli.main(["serve", "--port", port]) == cli.EXIT_ENVIRONMENT
    assert f"port: cannot open 127.0.0.1:{port}" in capsys.readouterr().err


def test_free_port_is_opened_and_an_unknown_address_is_not() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with bind(load_settings(port=port)) as listener:
        assert listener.getsockname()[1] == port
    with pytest.raises(DeviceError):
        bind(load_settings(host="192.0.2.77"))


def test_what_cannot_work_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        check(load_settings(weights=str(tmp_path / "none")))
    (tmp_path / "file").touch()
    with pytest.raises((ConfigError, OSError)):
        check(load_settings(record=str(tmp_path / "file")))


def test_the_large_model_is_served_like_the_small_one() -> None:
    check(load_settings(preset="h3_33b", weights="random", size="832x480", device="cuda"))
    with pytest.raises(ConfigError, match="no weights ship with h3_33b; allowed: random"):
        check(load_settings(preset="h3_33b"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ranks": 4}, "ranks: 4 for a model of 6 heads; allowed: 1, 2, 3, 6"),
        ({"ranks": 2, "renderer": True}, "ranks: 2 with renderer; allowed: 1"),
        ({"ranks": 2, "device": "cuda:1"}, "device: 'cuda:1' with ranks 2; allowed: auto, cpu"),
        ({"ranks": 2, "device": "cpu"}, "dtype: 'auto' with ranks 2 on a CPU; allowed: float32"),
    ],
)
def test_ranks_that_cannot_work_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(load_settings(**given))


def test_ranks_of_the_large_model_are_for_the_worker_to_place() -> None:
    check(load_settings(preset="h3_33b", weights="random", ranks=8, max_sessions=2))


def test_other_machines_need_tls_or_a_proxy_that_has_it() -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1"):
        with pytest.raises(ConfigError, match="--tls-cert"):
            check_exposure(load_settings(host=host))
    check_exposure(load_settings(host="0.0.0.0", trusted_proxies="10.0.0.1"))
    check_exposure(load_settings())


def test_files_of_no_use_for_tls_are_refused(tmp_path: Path) -> None:
    junk = tmp_path / "junk.pem"
    junk.write_text("junk")
    for name in (str(junk), str(tmp_path / "none.pem")):
        with pytest.raises(ConfigError, match="tls_cert"):
            check_exposure(load_settings(tls_cert=name, tls_key=name))


def test_token_is_made_up_only_for_other_machines() -> None:
    assert with_token(load_settings()).token is None
    assert with_token(load_settings(trusted_proxies="127.0.0.1")).token is not None
    made = with_token(load_settings(host="0.0.0.0"))
    assert made.token is not None
    given = with_token(load_settings(host="0.0.0.0", token="hunter2"))
    assert given.token is not None
    assert given.token.get_secret_value() == "hunter2"


def test_url_carries_the_token_in_its_fragment() -> None:
    assert page_url(load_settings()) == "http://127.0.0.1:8000/"
    assert page_url(load_settings(host="::1", token="t")) == "http://[::1]:8000/#token=t"
    secure = load_settings(tls_cert="cert.pem", tls_key="key.pem")
    assert page_url(secure) == "https://127.0.0.1:8000/"


def test_printed_configuration_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--port", "9000", "--print-config"]) == cli.EXIT_OK
    assert json.loads(capsys.readouterr().out)["port"] == 9000
