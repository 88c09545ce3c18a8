"""What a machine has for a preset: versions, device, backends, ports, codecs.

Owns how each is found out. Invariant: nothing is loaded or allocated, and nothing is left open.
"""

from __future__ import annotations

import importlib.util
import platform
import socket
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version

import torch

from benchmarks.record import describe_machine
from engine.attention.base import AttentionNeed, backends
from engine.attention.sparse import sparse_refusal
from engine.config import ModelConfig, TextConfig
from engine.device import (
    blocks_refusal,
    gpu_count,
    likely_dtype,
    present_memory,
    resolve_device,
    torch_dtype,
)
from engine.errors import DeviceError
from engine.schemes import SCHEMES
from engine.speed import kernels_refusal
from stream.findings import Finding, Health, findings_of
from stream.settings import ServerSettings
from stream.world_place import place_world
from stream.world_spec import WorldSpec

_GIB = 2**30
_PACKAGES = (
    "torch", "triton", "numpy", "safetensors", "av", "aiortc", "fastapi", "pillow",
    "transformers", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13",
)  # fmt: skip
_OPTIONAL_PACKAGES = frozenset({"triton", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13"})
_CODECS = ("libx264", "libvpx", "mjpeg")
_UDP_TRIES = 4
"""Ports of a range that are tried: the first, the last, and some between."""


def version_findings(model: ModelConfig) -> Iterator[Finding]:
    """What is installed; a model that reads a Qwen3-VL needs transformers."""
    make = findings_of("versions")
    yield make("python", Health.OK, f"{platform.python_version()} on {platform.platform()}")
    yield make("worldstream", Health.OK, _version("worldstream") or "not installed: a checkout")
    for package in _PACKAGES:
        found = _version(package)
        if found is not None:
            yield make(package, Health.OK, found)
        elif package == "transformers" and isinstance(model.text, TextConfig):
            yield make(package, Health.NOTE, "not installed; this preset reads words of its own")
        elif package == "transformers":
            yield make(package, Health.MISSING, "not installed: pip install 'worldstream[h3]'")
        elif package not in _OPTIONAL_PACKAGES:
            yield make(package, Health.MISSING, "not installed")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def device_findings(name: str) -> Iterator[Finding]:
    """Processor, GPUs, and the one that was asked for."""
    make = findings_of("device")
    machine = describe_machine(torch.device("cpu"))
    yield make("processor", Health.OK, f"{machine.cpu}, {machine.threads} threads")
    if not torch.cuda.is_available():
        built = torch.version.cuda
        detail = "none" + ("" if built else f"; torch {torch.__version__} is built without CUDA")
        yield make("GPU", Health.NOTE, detail)
    else:
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            yield make(
                f"GPU {index}",
                Health.OK,
                f"{properties.name}, {properties.total_memory / _GIB:.1f} GiB, capability "
                f"{properties.major}.{properties.minor}, CUDA {torch.version.cuda}, "
                f"cuDNN {torch.backends.cudnn.version()}",  # type: ignore[no-untyped-call]
            )
    try:
        yield make("chosen", Health.OK, f"{name}: {resolve_device(name)}")
    except DeviceError as error:
        yield make("chosen", Health.MISSING, str(error))


def rank_findings(spec: WorldSpec) -> Iterator[Finding]:
    """Where the ranks of a world would be, if there are several."""
    if spec.rank_count == 1:
        return
    make = findings_of("device")
    try:
        # On a CPU serve needs a dtype by name as well; here the devices are the question.
        engine = replace(spec.engine, dtype="bfloat16")
        places = place_world(replace(spec, engine=engine), gpu_count())
    except DeviceError as error:
        yield make("ranks", Health.MISSING, str(error))
        return
    yield make("ranks", Health.OK, ", ".join(places))


def backend_findings(device: torch.device, model: ModelConfig) -> Iterator[Finding]:
    """Attention, kernels, graphs, products in eight bits."""
    make = findings_of("backends")
    need = AttentionNeed.on(device, torch_dtype(likely_dtype(device)), model.attention_head_dim)
    for backend in backends().values():
        reason = backend.refusal(need)
        health = Health.OK if reason is None else Health.NOTE
        yield make(f"attention {backend.name}", health, "serves" if reason is None else reason)
    reason = sparse_refusal(need, model.num_layers)
    health = Health.OK if reason is None else Health.NOTE
    yield make("attention sparse", health, "serves, by name" if reason is None else reason)
    has_triton = importlib.util.find_spec("triton") is not None
    is_cuda = device.type == "cuda"
    lacks = blocks_refusal(device) if is_cuda else None
    no_kernels = kernels_refusal("bf16", model)
    for name, is_there, otherwise in (
        (
            "fused kernels",
            is_cuda and has_triton and no_kernels is None,
            no_kernels or "need CUDA and triton",
        ),
        ("CUDA graphs", is_cuda, "need CUDA"),
        (
            f"FP8 products: {_linears(in_blocks=False)}",
            present_memory(device).has_fp8,
            "need CUDA of capability 8.9 or more",
        ),
        (
            f"FP8 products in blocks: {_linears(in_blocks=True)}",
            is_cuda and lacks is None,
            lacks or "need CUDA",
        ),
    ):
        yield make(name, Health.OK if is_there else Health.NOTE, "" if is_there else otherwise)


def _linears(*, in_blocks: bool) -> str:
    """Schemes that need such products and no others that are rarer."""
    return ", ".join(
        name
        for name, scheme in SCHEMES.items()
        if scheme and any(rule.in_blocks for rule in scheme) == in_blocks
    )


def network_findings(settings: ServerSettings) -> Iterator[Finding]:
    """The port of the service and those for media."""
    make = findings_of("network")
    where = f"{settings.host}:{settings.port}"
    reason = _refusal(socket.SOCK_STREAM, settings.host, settings.port)
    if reason is None:
        yield make("port", Health.OK, f"{where} can be opened")
    else:
        yield make("port", Health.MISSING, f"{where}: {reason}; choose another: --port")
    hosts = settings.ice_hosts or ("0.0.0.0",)
    first, last = settings.udp_ports or (0, 0)
    step = max(1, (last - first) // _UDP_TRIES)
    tried = sorted({*range(first, last + 1, step), last})
    refused = [
        f"{host}:{port}: {reason}"
        for host in hosts
        for port in tried
        if (reason := _refusal(socket.SOCK_DGRAM, host, port)) is not None
    ]
    ports = "any" if settings.udp_ports is None else f"{first}-{last}"
    if not refused:
        yield make("UDP for media", Health.OK, f"{ports} on {', '.join(hosts)}")
    elif len(refused) < len(tried) * len(hosts):
        yield make("UDP for media", Health.NOTE, f"{ports}: some are taken: {refused[0]}")
    else:
        detail = f"{ports}: {refused[0]}; video goes over the WebSocket instead"
        yield make("UDP for media", Health.NOTE, detail)


def _refusal(kind: socket.SocketKind, host: str, port: int) -> str | None:
    """Return why a port cannot be opened, or None."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, kind) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(kind is socket.SOCK_STREAM))
        try:
            tried.bind((host, port))
        except OSError as error:
            return error.strerror or str(error)
    return None


def codec_findings() -> Iterator[Finding]:
    """Video codecs of this build of PyAV."""
    make = findings_of("codecs")
    try:
        from av import codecs_available
    except ImportError as error:
        yield make("PyAV", Health.MISSING, str(error))
        return
    for name in _CODECS:
        if name in codecs_available:
            yield make(name, Health.OK, "")
        else:
            health = Health.MISSING if name == "libx264" else Health.NOTE
            yield make(name, health, "this build of PyAV lacks it")
