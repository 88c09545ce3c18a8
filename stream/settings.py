"""Settings of the live service: options of `worldstream serve` and `WORLDSTREAM_*` variables.

Owns every default and range. Invariants: a value of the command line wins over the environment,
which wins over the default; a wrong one is refused in one line that names what is allowed.
"""

from __future__ import annotations

import ipaddress
import json
import os
import time
from typing import Annotated, Any, Literal, Self

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from engine.config import (
    SPARSE_BLOCKS,
    SPARSE_STEPS,
    SPARSE_STEPS_LIMIT,
    SPARSE_TAU_LIMIT,
    AttentionName,
)
from engine.errors import ConfigError
from stream.ice_servers import parse_ice_server, with_user
from stream.protocol import IceServer

TURN_MARGIN_S = 600.0
ENV_PREFIX = "WORLDSTREAM_"


class ServerSettings(BaseSettings):
    """Everything that the service can be told. Times are in the unit of the name."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, frozen=True, extra="forbid", env_ignore_empty=True
    )

    preset: Literal["mini", "h3_33b", "tiny"] = "mini"
    renderer: bool = False
    """True frames of the ray-caster in place of the model's."""
    weights: str = "shipped"
    size: Annotated[str, Field(pattern=r"^[0-9]{2,4}x[0-9]{2,4}$")] | None = None
    """Of the pictures; by default the largest that the preset knows."""
    decoder: str = "auto"
    """Mode of the decoder, which also chooses among several; auto: the best that is there."""
    linear: str = "auto"
    """Products of the blocks; auto: bf16 wherever that fits, else fp8_mixed, else fp8_rowwise."""
    attention: AttentionName = "auto"
    """Over the window; auto: what is fastest here; sparse: a part in summary, an approximation."""
    sparse_tau: Annotated[float, Field(ge=-SPARSE_TAU_LIMIT, le=SPARSE_TAU_LIMIT)] = 1.0
    """Of sparse attention: larger reads less."""
    sparse_block: int = 64
    """Of sparse attention: keys that share a summary."""
    sparse_steps: Annotated[int, Field(ge=1, le=SPARSE_STEPS_LIMIT)] = SPARSE_STEPS
    """Of sparse attention: denoise steps, the first of a chunk, that read a part."""
    kernels: Literal["auto", "off", "eager", "fast"] = "auto"
    """Fused kernels and where they round."""
    compile: Literal["auto", "off", "blocks", "full"] = "auto"
    """What is compiled at the first start, and kept: the halves of a block, or the whole pass."""
    prompt_encoder: str | None = None
    """Folder of the Qwen3-VL that h3_33b reads; by default the one beside the weights."""
    prompt_residency: Literal["auto", "gpu", "cpu", "free"] = "auto"
    """Where its weights stay; free reads them for each new prompt."""
    prompt_cache: str | None = None
    """Folder of encoded prompts; by default ~/.cache/worldstream/prompts."""
    prompt_cache_mib: Annotated[int, Field(ge=0)] | None = None
    """Bound on it; 0 keeps none."""
    refinement_prompt: bool = False
    """Encode one canonical prompt about looks in place of every prompt."""
    lora: str | None = None
    """Adapter: a file, or the folder that training left it in; by default the one that lies in the
    folder of weights."""
    lora_mode: Literal["auto", "merged", "separate", "fused"] = "auto"
    qkv_layout: Literal["auto", "interleaved", "stacked"] = "auto"
    """Order of fused projections in weights of the original layout."""
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    ranks: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes that share each world: a GPU of its own for each, or all of them on the CPU."""
    threads: Annotated[int, Field(ge=1, le=256)] | None = None
    """Threads of a world on a CPU, of all its ranks; by default torch's choice, one a core."""
    scene: Annotated[str, Field(pattern=r"^[a-z0-9-]{1,64}$")] = "meadow-forest"
    """What a session begins with that names nothing."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    allowed_hosts: Annotated[tuple[str, ...], NoDecode] = ()
    """Names besides the address itself under which browsers may reach the service."""
    allowed_origins: Annotated[tuple[str, ...], NoDecode] = ()
    """Origins of other pages that may use it, such as https://example.org."""
    trusted_proxies: str = ""
    """Addresses of proxies that encrypt, with commas between them; their X-Forwarded-* count."""
    tls_cert: str | None = None
    """PEM file of the certificate and its chain."""
    tls_key: str | None = None
    """PEM file of its private key."""
    token: SecretStr | None = None
    """Needed by whoever creates a session; made up and printed when bound to the outside."""

    ice_server: Annotated[tuple[str, ...], NoDecode] = ()
    """stun:host:port, turn:user:password@host:port?transport=tcp, or without user and password."""
    turn_secret: SecretStr | None = None
    """Shared with a TURN server that makes short-lived users from it (coturn: use-auth-secret)."""
    media_hosts: Annotated[tuple[str, ...], NoDecode] = ()
    """Local addresses for WebRTC; by default those on which the service can be reached."""
    udp_ports: Annotated[tuple[int, int] | None, NoDecode] = None
    """First and last UDP port for media, as A-B."""
    bit_rate_kbps: Annotated[int, Field(ge=100, le=50_000)] | None = None
    """Of the whole video; by default 2,000, and 4,000 from 1280x720 on."""
    webrtc: bool = True

    record: str | None = None
    """Folder that keeps traces and recordings; without it they live as long as the session."""
    max_sessions: Annotated[int, Field(ge=1, le=8)] = 1
    """Worlds at a time; each has a worker process of its own."""
    max_queue: Annotated[int, Field(ge=0, le=1_000)] = 16
    max_viewers: Annotated[int, Field(ge=0, le=64)] = 8
    """For each session, the player not counted."""

    memory_limit_mib: Annotated[int, Field(ge=64)] | None = None
    """Resident memory of all processes above which nobody is admitted, then sessions end."""
    gpu_limit_mib: Annotated[int, Field(ge=64)] | None = None
    """The same for the memory of devices."""

    hb_ms: Annotated[int, Field(ge=200, le=10_000)] = 2_000
    dead_s: Annotated[float, Field(ge=1, le=60)] = 10.0
    grace_s: Annotated[float, Field(ge=0, le=600)] = 30.0
    """How long the place of a player whose socket was lost is kept."""
    bye_grace_s: Annotated[float, Field(ge=0, le=600)] = 4.0
    """The same after a bye: long enough to load the page anew."""
    idle_pause_s: Annotated[float, Field(ge=1, le=86_400)] = 60.0
    idle_ready_s: Annotated[float, Field(ge=1, le=86_400)] = 120.0
    idle_paused_s: Annotated[float, Field(ge=1, le=86_400)] = 300.0
    warm_up_s: Annotated[float, Field(ge=1, le=3_600)] = 120.0
    queue_s: Annotated[float, Field(ge=1, le=86_400)] = 600.0
    queue_gone_s: Annotated[float, Field(ge=1, le=600)] = 15.0
    max_duration_s: Annotated[float, Field(ge=10, le=86_400)] = 1_800.0
    key_refresh_ms: Annotated[int, Field(ge=10, le=1_000)] = 50
    key_stale_ms: Annotated[int, Field(ge=100, le=10_000)] = 500
    jit_margin_ms: Annotated[float, Field(ge=0, le=1_000)] = 20.0
    """Reserve of the start of a chunk. At 40 the frames of the small world wait 120 ms for their
    turn and not one is late; at 10 they wait 60 to 90 ms, and 23.9 of 24 a second are shown."""
    kf_min_ms: Annotated[int, Field(ge=50, le=10_000)] = 500
    ladder_direct_s: Annotated[float, Field(ge=0.5, le=60)] = 3.0
    ladder_relay_s: Annotated[float, Field(ge=0.5, le=60)] = 5.0

    image_limit_bytes: Annotated[int, Field(ge=1_024, le=64 * 2**20)] = 8 * 2**20
    messages_per_s: Annotated[int, Field(ge=10, le=10_000)] = 200
    sessions_per_min: Annotated[int, Field(ge=1, le=10_000)] = 10
    sockets_per_address: Annotated[int, Field(ge=1, le=10_000)] = 4

    @field_validator("allowed_hosts", "allowed_origins", "ice_server", "media_hosts", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return value

    @field_validator("sparse_block")
    @classmethod
    def _check_block(cls, value: int) -> int:
        if value not in SPARSE_BLOCKS:
            raise ValueError(f"allowed: {', '.join(map(str, SPARSE_BLOCKS))}")
        return value

    @field_validator("ice_server")
    @classmethod
    def _check_ice(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for each in value:
            parse_ice_server(each)
        return value

    @field_validator("media_hosts")
    @classmethod
    def _check_media_hosts(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for each in value:
            try:
                ipaddress.ip_address(each)
            except ValueError:
                raise ValueError("allowed: addresses such as 192.0.2.7 or 2001:db8::7") from None
        return value

    @model_validator(mode="after")
    def _check_turn(self) -> Self:
        servers = [parse_ice_server(each) for each in self.ice_server]
        bare = [each for each in servers if each.urls[0].startswith("turn") and not each.username]
        if bare and self.turn_secret is None:
            raise ValueError(
                "ice_server: a TURN server needs user:password@ before its host, or a turn_secret"
            )
        return self

    @field_validator("udp_ports", mode="before")
    @classmethod
    def _parse_ports(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        first, dash, last = value.partition("-")
        if not (dash and first.isdigit() and last.isdigit()):
            raise ValueError("allowed: A-B, such as 50000-50100")
        return (int(first), int(last))

    @field_validator("trusted_proxies")
    @classmethod
    def _check_proxies(cls, value: str) -> str:
        for each in filter(None, (part.strip() for part in value.split(","))):
            try:
                ipaddress.ip_network(each, strict=False)
            except ValueError:
                raise ValueError("allowed: addresses or networks such as 10.0.0.0/8") from None
        return value

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert, tls_key: only one is given; allowed: both or none")
        return self

    @model_validator(mode="after")
    def _check_ports(self) -> Self:
        if self.udp_ports is not None:
            first, last = self.udp_ports
            if not 1024 <= first <= last <= 65535:
                raise ValueError(f"udp_ports: {first}-{last}; allowed: 1024 <= A <= B <= 65535")
        return self

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the service."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def is_public(self) -> bool:
        """Whether other machines can reach it, by themselves or through a proxy."""
        return not self.is_loopback or bool(self.trusted_proxies)

    @property
    def ice_servers(self) -> tuple[IceServer, ...]:
        """The ICE servers as browsers want them now; users made from a secret are good for long
        enough to wait in the queue and play.
        """
        servers = (parse_ice_server(each) for each in self.ice_server)
        if self.turn_secret is None:
            return tuple(servers)
        secret = self.turn_secret.get_secret_value()
        until_s = time.time() + self.queue_s + self.max_duration_s + TURN_MARGIN_S
        return tuple(with_user(each, secret, until_s) for each in servers)

    @property
    def ice_hosts(self) -> tuple[str, ...] | None:
        """Local addresses for WebRTC; None for those of all interfaces."""
        if self.media_hosts:
            return self.media_hosts
        try:
            address = ipaddress.ip_address(self.host)
        except ValueError:
            return ("127.0.0.1",) if not self.is_public else None
        # Behind a proxy on this machine, browsers come from elsewhere.
        if address.is_unspecified or (address.is_loopback and self.is_public):
            return None
        return (self.host,)

    def printable(self) -> str:
        """All settings as JSON, secrets left out."""
        values = self.model_dump(mode="json")
        values["ice_server"] = [each.rpartition("@")[2] for each in self.ice_server]
        return json.dumps(values, indent=2)


def load_settings(**given: Any) -> ServerSettings:
    """Return the settings: the values given that are not None, else environment, else defaults.

    Raises:
        ConfigError: names the setting, its value and what is allowed.
    """
    chosen = {name: value for name, value in given.items() if value is not None}
    known = {f"{ENV_PREFIX}{name}".upper() for name in ServerSettings.model_fields}
    for name in sorted(os.environ):
        if name.startswith(ENV_PREFIX) and name not in known:
            raise ConfigError(f"{name}: there is no such setting; see worldstream serve --help")
    try:
        return ServerSettings(**chosen)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(str(part) for part in first["loc"]) or "settings"
        reason = str(first["msg"]).removeprefix("Value error, ")
        reason = reason.replace("Input should be", "allowed:")
        value = "" if name in ("token", "ice_server") else f" {str(first['input'])[:60]!r};"
        if name == "settings":
            raise ConfigError(reason) from None
        raise ConfigError(f"{name}:{value} {reason}") from None
