"""`worldstream doctor`: can this machine serve a preset, and what exactly is missing.

Owns the findings and the verdict; `doctor_tables` prints them, `weight_sources` has what the public
offers. Invariants: nothing is loaded, allocated or fetched; what cannot be found out is said, never
an error; each thing that is missing says what to do.
"""

from __future__ import annotations

import importlib.util
import platform
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import describe_machine, size_name
from engine.attention.base import AttentionNeed, backends
from engine.config import EngineConfig, Geometry, ModelConfig, preset
from engine.device import likely_dtype, present_memory, resolve_device, torch_dtype
from engine.errors import CheckpointError, ConfigError, DeviceError, WorldStreamError
from engine.memory import MemoryPlan, Present
from stream.plan_world import plan_world
from stream.settings import ServerSettings
from stream.weight_folder import WeightFolder, look_through
from stream.weight_sources import LICENCE_NOTE, sources_of
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


class Health(StrEnum):
    """Verdict on one thing."""

    OK = "ok"
    NOTE = "note"
    """Worth knowing; nothing depends on it."""
    MISSING = "missing"
    """Without it the preset cannot be served here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that was looked at."""

    section: str
    name: str
    health: Health
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedSize:
    """Memory at one picture size."""

    geometry: Geometry
    plan: MemoryPlan | None
    reason: str
    """Why there is no plan."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """All that was found."""

    preset: str
    findings: tuple[Finding, ...]
    present: Present
    sizes: tuple[PlannedSize, ...]
    licence: str

    @property
    def missing(self) -> tuple[Finding, ...]:
        """What has to be done before the preset can be served here."""
        return tuple(each for each in self.findings if each.health is Health.MISSING)

    @property
    def is_ready(self) -> bool:
        """Whether the preset can be served here."""
        return not self.missing

    def as_json(self) -> dict[str, Any]:
        """Everything, json-ready."""
        return {
            "preset": self.preset,
            "is_ready": self.is_ready,
            "missing": [f"{each.section}: {each.name}: {each.detail}" for each in self.missing],
            "findings": [asdict(each) for each in self.findings],
            "present": {
                name: None if value == float("inf") else value
                for name, value in asdict(self.present).items()
            },
            "memory": [_size_as_json(each) for each in self.sizes],
            "licence": self.licence,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What is asked. Raises ConfigError for a preset or a picture size that there is none of."""

    preset: str
    weights: str | None = None
    """Folder, "shipped" or "random"; None: what ships, else nothing."""
    size: str | None = None
    """Picture size to plan for; None: all that the preset knows."""
    device: str = "auto"

    def __post_init__(self) -> None:
        sizes = [size_name(each) for each in preset(self.preset).geometries]
        if self.size is not None and self.size not in sizes:
            raise ConfigError(f"size: {self.size!r}; allowed for {self.preset}: {', '.join(sizes)}")

    @property
    def specs(self) -> tuple[WorldSpec, ...]:
        """The world at each picture size."""
        return tuple(
            WorldSpec(
                source="model",
                preset=self.preset,
                geometry=each,
                weights=self.weights or ("random" if self.preset == "tiny" else "shipped"),
                engine=EngineConfig(device=self.device),
            )
            for each in preset(self.preset).geometries
            if self.size in (None, size_name(each))
        )


def examine(question: Question, settings: ServerSettings) -> Report:
    """Look at everything that a preset needs.

    Args:
        question: which preset, and where its weights are said to be.
        settings: addresses and ports.
    """
    specs = question.specs
    spec = specs[0]
    found = preset(spec.preset, spec.geometry)
    findings = [*_versions(), *_device(spec.engine.device)]
    try:
        device = resolve_device(spec.engine.device)
    except DeviceError:  # said above
        device = torch.device("cpu")
        specs = tuple(replace(each, engine=EngineConfig(device="cpu")) for each in specs)
    findings += _backends(device, found.model)
    try:
        folder = _folder(spec)
    except CheckpointError as error:
        folder = None
        findings.append(_finding("files")("weights", Health.MISSING, str(error)))
    findings += _files(spec, folder)
    present = present_memory(device)
    sizes = tuple(_planned(each, folder, present) for each in specs)
    findings += _memory(sizes, present)
    findings += _network(settings)
    findings += _codecs()
    licence = LICENCE_NOTE if sources_of(spec.preset) else ""
    return Report(
        preset=spec.preset,
        findings=tuple(findings),
        present=present,
        sizes=sizes,
        licence=licence,
    )


def _finding(section: str) -> Callable[[str, Health, str], Finding]:
    return lambda name, health, detail: Finding(
        section=section, name=name, health=health, detail=detail
    )


def _versions() -> Iterator[Finding]:
    make = _finding("versions")
    yield make("python", Health.OK, f"{platform.python_version()} on {platform.platform()}")
    yield make("worldstream", Health.OK, _version("worldstream") or "not installed: a checkout")
    for package in _PACKAGES:
        found = _version(package)
        if found is not None:
            yield make(package, Health.OK, found)
        elif package not in _OPTIONAL_PACKAGES:
            health = Health.NOTE if package == "transformers" else Health.MISSING
            yield make(package, health, "not installed")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _device(name: str) -> Iterator[Finding]:
    make = _finding("device")
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


def _backends(device: torch.device, model: ModelConfig) -> Iterator[Finding]:
    make = _finding("backends")
    need = AttentionNeed.on(device, torch_dtype(likely_dtype(device)), model.attention_head_dim)
    for backend in backends().values():
        reason = backend.refusal(need)
        health = Health.OK if reason is None else Health.NOTE
        yield make(f"attention {backend.name}", health, "serves" if reason is None else reason)
    has_triton = importlib.util.find_spec("triton") is not None
    is_cuda = device.type == "cuda"
    for name, is_there, otherwise in (
        ("fused kernels", is_cuda and has_triton, "need CUDA and triton"),
        ("CUDA graphs", is_cuda, "need CUDA"),
        ("FP8 products", present_memory(device).has_fp8, "need CUDA of capability 8.9 or more"),
    ):
        yield make(name, Health.OK if is_there else Health.NOTE, "" if is_there else otherwise)


def _files(spec: WorldSpec, folder: WeightFolder | None) -> Iterator[Finding]:
    make = _finding("files")
    needed = sources_of(spec.preset)
    if spec.weights == "random":
        yield make("weights", Health.NOTE, "random: to measure speed and memory, not to look at")
        needed = ()
    if folder is not None:
        yield make("folder", Health.OK, str(folder.path))
        for role, places in folder.places.items():
            if places:
                names = ", ".join(str(each.relative_to(folder.path)) for each in places)
                yield make(role, Health.OK, names)
        for file in folder.unknown:
            yield make("unknown", Health.NOTE, f"{file.relative_to(folder.path)}")
    for source in needed:
        if folder is not None and folder.places[source.role]:
            continue
        health = Health.MISSING if source.is_needed else Health.NOTE
        yield make(
            source.role,
            health,
            f"not there ({source.size_gb:.1f} GB); public: {source.repository}. Without it: "
            f"{source.without}",
        )


def _folder(spec: WorldSpec) -> WeightFolder | None:
    """What lies in the folder of weights; None where none was named."""
    if spec.weights == "random":
        return None
    path = preset(spec.preset).weights if spec.weights == "shipped" else Path(spec.weights)
    return None if path is None else look_through(path)


def _planned(spec: WorldSpec, folder: WeightFolder | None, present: Present) -> PlannedSize:
    try:
        plan = plan_world(spec, folder, present).plan
    except WorldStreamError as error:
        return PlannedSize(geometry=spec.geometry, plan=None, reason=str(error))
    return PlannedSize(geometry=spec.geometry, plan=plan, reason="")


def _memory(sizes: Sequence[PlannedSize], present: Present) -> Iterator[Finding]:
    make = _finding("memory")
    yield make("free", Health.OK, f"{present.device_gib:.1f} GiB")
    fits_any = any(each.plan is not None for each in sizes)
    for each in sizes:
        name = size_name(each.geometry)
        if each.plan is not None:
            residency = ", modulation weights given up" if each.plan.free_adaln else ""
            detail = f"fits: {each.plan.peak_gib:.1f} GiB, linears {each.plan.linear}{residency}"
            yield make(name, Health.OK, detail)
        else:
            yield make(name, Health.NOTE if fits_any else Health.MISSING, each.reason)


def _network(settings: ServerSettings) -> Iterator[Finding]:
    make = _finding("network")
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


def _codecs() -> Iterator[Finding]:
    make = _finding("codecs")
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


def _size_as_json(size: PlannedSize) -> dict[str, Any]:
    name = size_name(size.geometry)
    plan = size.plan
    if plan is None:
        return {"geometry": name, "fits": False, "reason": size.reason}
    return {
        "geometry": name,
        "fits": True,
        "dtype": plan.dtype,
        "linear": plan.linear,
        "free_adaln": plan.free_adaln,
        "loading_gib": round(plan.loading_gib, 3),
        "playing_gib": round(plan.playing_gib, 3),
        "host_gib": round(plan.host_gib, 3),
        "parts": [asdict(part) for part in plan.parts],
    }
