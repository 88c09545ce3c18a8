"""`worldstream doctor`: can this machine serve a preset, and what exactly is missing.

Owns the findings and the verdict; `doctor_tables` prints them, `weight_sources` has what the public
offers. Invariants: nothing is loaded, allocated or fetched; what cannot be found out is said, never
an error; each thing that is missing says what to do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import size_name
from engine.checkpoint.adapter_files import PICKLE_SUFFIX as ADAPTER_SUFFIX
from engine.checkpoint.folder import read_config
from engine.config import EngineConfig, Geometry, ModelConfig, PromptOptions, preset
from engine.device import present_memory, resolve_device
from engine.errors import CheckpointError, ConfigError, DeviceError, WorldStreamError
from engine.lora import adapter_report
from engine.memory import MemoryPlan, Present
from stream.doctor_machine import (
    backend_findings,
    codec_findings,
    device_findings,
    network_findings,
    rank_findings,
    version_findings,
)
from stream.findings import Finding, Health, findings_of
from stream.plan_world import plan_world
from stream.settings import ServerSettings
from stream.weight_checks import describe_network, describe_prompt_encoder
from stream.weight_folder import Role, WeightFolder, look_through
from stream.weight_sources import LICENCE_NOTE, sources_of
from stream.world_spec import WorldSpec, check_ranks


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
    lora: str | None = None
    """Adapter to look at, besides one that lies with the weights."""
    size: str | None = None
    """Picture size to plan for; None: all that the preset knows."""
    device: str = "auto"
    decoder: str = "auto"
    """Mode of the decoder, as of `serve`."""
    prompt_encoder: str | None = None
    """Folder of the prompt encoder, where it does not lie with the weights."""
    ranks: int = 1
    """Processes that share each world."""

    def __post_init__(self) -> None:
        if self.ranks > 1:
            heads = preset(self.preset).model.num_attention_heads
            check_ranks(self.ranks, heads, device=self.device)
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
                decoder=self.decoder,
                rank_count=self.ranks,
                engine=EngineConfig(
                    device=self.device,
                    lora=self.lora,
                    prompts=PromptOptions(encoder=self.prompt_encoder),
                ),
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
    findings = [*version_findings(found.model), *device_findings(spec.engine.device)]
    try:
        device = resolve_device(spec.engine.device)
    except DeviceError:  # said above
        device = torch.device("cpu")
        specs = tuple(replace(each, engine=replace(each.engine, device="cpu")) for each in specs)
    findings += rank_findings(spec)
    findings += backend_findings(device, found.model)
    try:
        folder = _folder(spec)
    except CheckpointError as error:
        folder = None
        findings.append(findings_of("files")("weights", Health.MISSING, str(error)))
    findings += _files(spec, folder, found.model)
    findings += _adapter(question.lora, folder, found.model)
    # What one rank gets of it when all of them start.
    present = present_memory(
        device,
        shared_by=question.ranks if device.type == "cpu" else 1,
        machine_shared_by=question.ranks,
    )
    sizes = tuple(_planned(each, folder, present) for each in specs)
    findings += _memory(sizes, present)
    findings += network_findings(settings)
    findings += codec_findings()
    licence = LICENCE_NOTE if sources_of(spec.preset) else ""
    return Report(
        preset=spec.preset,
        findings=tuple(findings),
        present=present,
        sizes=sizes,
        licence=licence,
    )


def _files(spec: WorldSpec, folder: WeightFolder | None, model: ModelConfig) -> Iterator[Finding]:
    make = findings_of("files")
    needed = sources_of(spec.preset)
    if spec.weights == "random":
        yield make("weights", Health.NOTE, "random: to measure speed and memory, not to look at")
        needed = ()
    if folder is not None:
        yield make("folder", Health.OK, str(folder.path))
        for role, places in folder.places.items():
            is_elsewhere = role == Role.PROMPT_ENCODER and spec.engine.prompts.encoder is not None
            if places and not is_elsewhere:
                yield _network(role, folder, model, spec)
        for file in folder.unknown:
            yield make("unknown", Health.NOTE, f"{file.relative_to(folder.path)}")
        for file in folder.pickles:
            detail = "not looked into, because reading it may run code; expected safetensors"
            if file.suffix == ADAPTER_SUFFIX:
                detail = "no adapter, which alone is read so; expected safetensors"
            yield make("pickle", Health.NOTE, f"{file.relative_to(folder.path)}: {detail}")
    encoder = spec.engine.prompts.encoder
    if encoder is not None:
        yield _prompt_encoder(Path(encoder), folder, model)
    for source in needed:
        if folder is not None and folder.places[source.role]:
            continue
        if source.role == Role.PROMPT_ENCODER and encoder is not None:
            continue
        health = Health.MISSING if source.is_needed else Health.NOTE
        yield make(
            source.role,
            health,
            f"not there ({source.size_gb:.1f} GB); public: {source.repository}. Without it: "
            f"{source.without}",
        )


def _network(role: Role, folder: WeightFolder, model: ModelConfig, spec: WorldSpec) -> Finding:
    """Whether what lies there for a role is whole."""
    make = findings_of("files")
    try:
        detail = describe_network(role, folder, spec, model)
    except (WorldStreamError, OSError) as error:
        return make(role, Health.MISSING, str(error))
    names = ", ".join(str(each.relative_to(folder.path)) for each in folder.places[role])
    return make(role, Health.OK, f"{names}: {detail}" if detail else names)


def _prompt_encoder(place: Path, folder: WeightFolder | None, model: ModelConfig) -> Finding:
    """Whether the prompt encoder that was named is whole."""
    make = findings_of("files")
    try:
        model = model if folder is None else read_config(folder.path, model)
        detail = describe_prompt_encoder(place, model)
    except (WorldStreamError, OSError) as error:
        return make(Role.PROMPT_ENCODER, Health.MISSING, str(error))
    return make(Role.PROMPT_ENCODER, Health.OK, f"{place}: {detail}")


def _adapter(
    lora: str | None, folder: WeightFolder | None, model: ModelConfig
) -> Iterator[Finding]:
    """What an adapter is, and what of it merging into bfloat16 weights would lose."""
    make = findings_of("adapter")
    weights = None
    try:
        place = None if lora is None else Path(lora)
        if folder is not None:
            model, weights = read_config(folder.path, model), folder.find(Role.TRANSFORMER)
            place = place or folder.find(Role.ADAPTER)
        if place is None:
            return
        report = adapter_report(place, model, weights)
    except (WorldStreamError, OSError) as error:
        yield make("file", Health.MISSING, str(error))
        return
    yield make("file", Health.OK, f"{report.summary}; {report.parameter_count / 1e6:.1f} M values")
    if not report.losses:
        detail = "not known without the weights that it changes: --weights"
        yield make("lost by a merge", Health.NOTE, detail)
        return
    worst = max(report.losses, key=lambda loss: loss.lost_share)
    is_large = report.should_stay_apart
    advice = "keep it apart: --lora-mode fused or separate" if is_large else "little"
    yield make(
        "lost by a merge",
        Health.NOTE if is_large else Health.OK,
        f"{report.lost_share:.1%} of the changes of bfloat16 weights, sampled in "
        f"{len(report.losses)} linears; {worst.lost_share:.1%} in {worst.name}, whose update comes "
        f"out {worst.error_ratio:.0%} off: {advice}",
    )


def _folder(spec: WorldSpec) -> WeightFolder | None:
    """What lies in the folder of weights; None where none was named."""
    if spec.weights == "random":
        return None
    path = preset(spec.preset).weights if spec.weights == "shipped" else Path(spec.weights)
    return None if path is None else look_through(path)


def _planned(spec: WorldSpec, folder: WeightFolder | None, present: Present) -> PlannedSize:
    try:
        plan = plan_world(spec, folder, present, world_size=spec.rank_count).plan
    except WorldStreamError as error:
        return PlannedSize(geometry=spec.geometry, plan=None, reason=str(error))
    return PlannedSize(geometry=spec.geometry, plan=plan, reason="")


def _memory(sizes: Sequence[PlannedSize], present: Present) -> Iterator[Finding]:
    make = findings_of("memory")
    yield make("free", Health.OK, f"{present.device_gib:.1f} GiB")
    fits_any = any(each.plan is not None for each in sizes)
    for each in sizes:
        name = size_name(each.geometry)
        if each.plan is not None:
            residency = ", modulation weights given up" if each.plan.free_adaln else ""
            detail = (
                f"fits: {each.plan.peak_gib:.1f} GiB, linears {each.plan.linear_words}{residency}"
            )
            yield make(name, Health.OK, detail)
        else:
            yield make(name, Health.NOTE if fits_any else Health.MISSING, each.reason)


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
        "linear_reason": plan.linear_reason,
        "free_adaln": plan.free_adaln,
        "loading_gib": round(plan.loading_gib, 3),
        "playing_gib": round(plan.playing_gib, 3),
        "host_gib": round(plan.host_gib, 3),
        "parts": [asdict(part) for part in plan.parts],
    }
