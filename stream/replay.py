"""Replay of a trace: the same inputs again, and the proof that the same latents came out.

Invariant: bit for bit on the same device, build and thread count, so the recorded thread count is
set for the time of the replay.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine.config import PromptOptions
from engine.errors import ConfigError
from stream.generate import ChunkInput, Made, open_recorder, roll_out
from stream.jobs import Outputs, check_prompt
from stream.trace import Trace
from stream.world_spec import Start, WorldSpec, read_start, world_spec

if TYPE_CHECKING:
    from stream.worlds import ModelCache


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayPlan:
    """A replay that can start."""

    trace: Trace
    world: WorldSpec
    start: Start
    outputs: Outputs | None
    force: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """What was made, and how it compares."""

    made: Made
    first_difference: int | None
    """First chunk whose digest is not the recorded one; None where all are equal."""
    warnings: tuple[str, ...]


def plan_replay(
    trace: Trace,
    folder: Path,
    *,
    image: str | None,
    outputs: Outputs | None,
    force: bool,
    prompts: PromptOptions | None = None,
    lora: str | None = None,
    lora_mode: str = "auto",
    qkv_layout: str = "auto",
) -> ReplayPlan:
    """Check a trace and its first picture before torch or weights are loaded.

    Args:
        trace: as read.
        folder: where the trace lies; its image is looked for as recorded and then there.
        image: where the image is now, if it moved.
        outputs: where frames go; None makes latents only.
        force: replay although the image or the model is another one.
        prompts: where the prompt encoder is now.
        lora: where the adapter is now.
        lora_mode: as it was used.
        qkv_layout: as the weights were read.

    Raises:
        ConfigError: names what does not fit.
    """
    header = trace.header
    if not trace.chunks:
        raise ConfigError("trace: it holds no chunk; nothing to replay")
    check_prompt(header.prompt)
    world = world_spec(
        header.preset,
        size=f"{header.width_px}x{header.height_px}",
        weights=header.weights,
        renderer=header.source == "renderer",
        # Which of several equal GPUs it was says nothing of the bits.
        device=header.device.partition(":")[0],
        dtype=header.dtype,
        prompts=prompts,
        lora=lora,
        lora_mode=lora_mode,
        qkv_layout=qkv_layout,
        linear=header.linear,
        attention=header.attention,
        sparse_tau=header.sparse_tau,
        sparse_block=header.sparse_block,
        sparse_steps=header.sparse_steps,
        kernels=header.kernels,
        compiling=header.compile,
    )
    path = image
    if image is None and header.image is not None:
        beside = folder / Path(header.image).name
        path = header.image if Path(header.image).is_file() or not beside.is_file() else str(beside)
    start = read_start(world, image=path, scene=header.scene)
    if start.image is not None and start.image.sha256 != header.image_sha256 and not force:
        raise ConfigError(
            f"image: {path!r} has sha256 {start.image.sha256[:16]}, the trace was made with "
            f"{str(header.image_sha256)[:16]}; allowed with --force"
        )
    return ReplayPlan(trace=trace, world=world, start=start, outputs=outputs, force=force)


def replay(plan: ReplayPlan, models: ModelCache) -> Replayed:
    """Make the chunks of a trace again.

    Raises:
        ConfigError: the weights are not those of the trace, or the processes not as many.
        WorldStreamError: the world cannot be opened.
        OSError: a file cannot be written; partial files are gone.
    """
    import torch

    from stream.session import Session

    header, chunks, ranks = plan.trace.header, plan.trace.chunks, models.ranks
    if ranks.count != header.rank_count:
        raise ConfigError(
            f"trace: made by {header.rank_count} processes, these are {ranks.count}; allowed: as "
            f"many, such as torchrun --nproc-per-node {header.rank_count} -m stream.cli replay"
        )
    outputs = plan.outputs if ranks.is_first else None
    threads_before = torch.get_num_threads()
    torch.set_num_threads(header.thread_count)
    try:
        world = models.world(plan.world, plan.start, with_frames=outputs is not None)
        if world.model_hash != header.model_hash and not plan.force:
            raise ConfigError(
                f"model: the weights here have hash {world.model_hash[:16]}, the trace was made "
                f"with {header.model_hash[:16]}; allowed with --force"
            )
        session = Session(world, prompt=header.prompt, seed=header.seed)
        digests: list[str] = []
        made = roll_out(
            session,
            [ChunkInput(action=chunk.action(), prompt=chunk.prompt) for chunk in chunks],
            len(chunks),
            ranks,
            recorder=open_recorder(outputs, world),
            note=lambda index, chunk, digest: digests.append(digest),
            label="replay",
        )
    finally:
        torch.set_num_threads(threads_before)
    pairs = enumerate(zip(digests, (chunk.digest for chunk in chunks), strict=False))
    differing = (index for index, (now, then) in pairs if now != then)
    warnings = []
    if header.torch_version != torch.__version__:
        warnings.append(f"torch is {torch.__version__}, the trace has {header.torch_version}")
    return Replayed(made=made, first_difference=next(differing, None), warnings=tuple(warnings))
