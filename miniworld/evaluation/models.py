"""The models under evaluation, and batches of rollouts made with them.

Owns loading from a folder of weights or of training results, the batched loop over the engine's own
core, and the streaming decode of a batch. Invariant: every clip has the draws of `SeededDraws` with
its own seed, so each rollout is what a session with that seed, picture and path would give.

Shape suffixes: B clips, T latent frames, F frames, C channels, H height, W width, 44 a matrix.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.attention.base import AttentionNeed, AttentionPlan, select_backend
from engine.attention.choice import group_shapes
from engine.attention.sparse import with_sparse
from engine.checkpoint.folder import read_config, sampled_hash, verify_manifest
from engine.checkpoint.reading import load_model
from engine.checkpoint.source import open_source
from engine.config import SPARSE_STEPS, AttentionName, EngineConfig, ModelConfig, preset
from engine.core import RolloutCore
from engine.linears import check_linears
from engine.model.dit import MiniMaxH3Transformer
from engine.prefix import PrefixDraws, PrefixInputs, make_prefix
from engine.quant import quantize_
from engine.rollout import SeededDraws
from engine.schemes import scheme_of
from engine.text import WordEncoder
from vae_stream.geometry import BLOCK_LATENTS
from vae_stream.pixels import from_uint8, to_uint8
from vae_stream.taehv import WEIGHTS_FILE, TinyVae, TinyVaeConfig

RANDOM_WEIGHTS = "random"
_CLIPS_PER_CALL = 16
_DRAW_THREADS = 8


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Models:
    """Transformer, word encoder and autoencoder on one device."""

    core: RolloutCore
    text: WordEncoder
    vae: TinyVae
    source: str
    weights_hash: str
    linear: str = "bf16"
    """Scheme of the linears of the blocks (`engine.quant`)."""
    attention: str = "sdpa"
    """Backend of the attention over the window (`engine.attention`)."""
    sparse_tau: float | None = None
    """Threshold of sparse attention, where it is in use."""
    sparse_block: int | None = None
    """Keys of its blocks."""
    sparse_steps: int | None = None
    """Denoise steps that it serves."""

    @property
    def config(self) -> ModelConfig:
        """Configuration of the transformer."""
        return self.core.config

    @property
    def device(self) -> torch.device:
        """Where everything lives."""
        return self.core.device


def load(
    source: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    stage: str = "",
    linear: str = "bf16",
    attention: AttentionName = "auto",
    sparse_tau: float = 1.0,
    sparse_block: int = 64,
    sparse_steps: int = SPARSE_STEPS,
) -> Models:
    """Load models in one dtype.

    Args:
        source: a folder of weights as shipped (config.json, shards, vae/), the folder of a
            training run, or "random" for untrained models of the shipped size.
        device: where to put them.
        dtype: of the transformer's blocks and of the autoencoder.
        stage: of a training run: "distil" or "flow"; the best that is there when empty.
        linear: scheme of the linears of the blocks; "bf16" leaves them in `dtype`.
        attention: backend of the attention over the window, or "sparse".
        sparse_tau: see `SparseAttention`.
        sparse_block: see `EngineConfig`.
        sparse_steps: see there.

    Raises: FileNotFoundError or CheckpointError when the folder is neither, ConfigError for a
        scheme, backend or threshold that is no such thing, UnsupportedError for one that this
        device lacks.
    """
    # Refuses what is no threshold, no size of a block and no count of steps.
    EngineConfig(
        attention=attention, sparse_tau=sparse_tau, sparse_block=sparse_block,
        sparse_steps=sparse_steps,
    )  # fmt: skip
    sizes = preset("mini").model
    check_linears(linear, sizes, device, dtype)
    need = AttentionNeed.on(device, dtype, sizes.attention_head_dim)
    plan = AttentionPlan.of(select_backend(need, "auto" if attention == "sparse" else attention))
    if attention == "sparse":
        shape = group_shapes(sizes, sizes.num_attention_heads, need)[-1]
        plan = with_sparse(
            plan, shape, sizes, tau=sparse_tau, block=sparse_block, steps=sparse_steps,
            device=device,
        )  # fmt: skip
    model, text, vae, label, weights_hash = _parts(source, device, dtype, stage)
    model.eval().requires_grad_(False)
    quantize_(model, scheme_of(linear))
    return Models(
        core=RolloutCore(model, attention=plan),
        text=text.to(device).eval().requires_grad_(False),
        vae=vae,
        source=label,
        weights_hash=weights_hash,
        linear=linear,
        attention=plan.names["video"],
        sparse_tau=None if plan.sparse is None else plan.sparse.tau,
        sparse_block=None if plan.sparse is None else plan.sparse.block,
        sparse_steps=None if plan.sparse is None else plan.sparse_steps,
    )


def _parts(
    source: str, device: torch.device, dtype: torch.dtype, stage: str
) -> tuple[MiniMaxH3Transformer, WordEncoder, TinyVae, str, str]:
    """Transformer, word encoder, autoencoder, what to call them, and the hash of their weights."""
    if source == RANDOM_WEIGHTS:
        return _random(device, dtype)
    folder = Path(source)
    vae = TinyVae.from_pretrained(folder / "vae", dtype=dtype, device=device)
    vae.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if (folder / "config.json").is_file():
        config = read_config(folder)
        known_hash, found = verify_manifest(folder), open_source(folder, config)
        weights_hash = known_hash or sampled_hash(found)
        text = WordEncoder.of(config)
        model = load_model(found, dtype=dtype, device=device, text_encoder=text)
        label = str(folder)
    else:
        from miniworld.train import build_models, load_shards, mini_config

        config = mini_config()
        name = _best_stage(folder, stage)
        model, text = build_models(config, load_shards(folder, name))
        shards = folder.glob(f"{name}-*.safetensors")
        weights_hash = _files_hash([*shards, folder / "vae" / WEIGHTS_FILE])
        label = f"{folder} ({name})"
        model = model.to(device)
        model.cast_blocks(dtype)
    return model, text, vae, label, weights_hash


def _random(
    device: torch.device, dtype: torch.dtype
) -> tuple[MiniMaxH3Transformer, WordEncoder, TinyVae, str, str]:
    from miniworld.train import mini_config

    config = mini_config()
    torch.manual_seed(0)
    model = MiniMaxH3Transformer(config)
    text = WordEncoder.of(config)
    vae = TinyVae(TinyVaeConfig()).cast(dtype).to(device)
    model.cast_blocks(dtype)
    vae.eval().requires_grad_(False)
    return model.to(device), text, vae, RANDOM_WEIGHTS, RANDOM_WEIGHTS


def _best_stage(folder: Path, stage: str) -> str:
    for name in (stage,) if stage else ("distil", "flow"):
        if any(folder.glob(f"{name}-*.safetensors")):
            return name
    raise FileNotFoundError(
        f"{folder}: no config.json of shipped weights and no shards of stage {stage or 'distil'}; "
        "train the stage first, or name another folder"
    )


def _files_hash(paths: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Walk:
    """What a batch of sessions is given: first pictures, paths and prompts."""

    anchor_BCTHW: Tensor
    """Latent of the first picture, one latent frame."""
    views_BT44: Tensor
    prompts: Sequence[str]
    later_prompts: Sequence[str]
    switch_chunk: int
    """First chunk under the later prompts; 0 means that the first ones are never used."""

    @property
    def chunks(self) -> int:
        """Length of the walk."""
        return self.views_BT44.shape[1] // BLOCK_LATENTS


class Sessions:
    """A batch of rollouts: the loop that `Engine.step` runs for one, without actions."""

    def __init__(self, models: Models, walk: Walk, seed: int) -> None:
        self._models, self._walk = models, walk
        count = len(walk.prompts)
        self._draws = [SeededDraws(models.config, seed * 4096 + clip) for clip in range(count)]
        drawn = [draws.prefix() for draws in self._draws]
        self._prefix_draws = PrefixDraws(
            anchor_eps_BCTHW=torch.cat([each.anchor_eps_BCTHW for each in drawn]),
            audio_u_B=torch.cat([each.audio_u_B for each in drawn]),
            audio_eps_BRC=torch.cat([each.audio_eps_BRC for each in drawn]),
        )
        prompts = walk.prompts if walk.switch_chunk > 0 else walk.later_prompts
        self._state = models.core.begin(self._prefix(prompts))
        self._pool = ThreadPoolExecutor(_DRAW_THREADS)
        self._next_draws = self._draw(0)
        self._noise: list[Tensor] = []

    @property
    def chunk(self) -> int:
        """Index of the next chunk to commit."""
        return self._state.chunk_index

    def _prefix(self, prompts: Sequence[str]) -> PrefixInputs:
        text, device = self._models.text, self._models.device
        ids_BR = torch.tensor([text.tokenize(prompt) for prompt in prompts], device=device)
        return make_prefix(
            self._models.config,
            text(ids_BR).float(),
            torch.ones(ids_BR.shape[1], dtype=torch.int64),
            self._walk.anchor_BCTHW,
            self._prefix_draws,
        )

    def _draw(self, chunk: int) -> list[Future[tuple[Tensor, ...]]]:
        def of_clip(draws: SeededDraws) -> tuple[Tensor, ...]:
            drawn = draws.chunk(chunk)
            return (drawn.noise_BCTHW, *drawn.step_noise)

        return [self._pool.submit(of_clip, draws) for draws in self._draws]

    def open(self) -> None:
        """Take prompt and draws of the next chunk, and start drawing those of the one after."""
        chunk = self.chunk
        if 0 < chunk == self._walk.switch_chunk:
            self._models.core.switch_prefix(self._state, self._prefix(self._walk.later_prompts))
        clips = [future.result() for future in self._next_draws]
        self._noise = [
            torch.cat(parts).to(self._models.device) for parts in zip(*clips, strict=True)
        ]
        if chunk + 1 < self._walk.chunks:
            self._next_draws = self._draw(chunk + 1)

    def denoise(self, leading_BCTHW: Tensor | None = None) -> Tensor:
        """Make the open chunk, [B, C, 5, H, W]; may be done again, with other leading latents."""
        span = slice(BLOCK_LATENTS * self.chunk, BLOCK_LATENTS * (self.chunk + 1))
        return self._models.core.denoise(
            self._state,
            self._noise[0],
            self._noise[1:],
            self._walk.views_BT44[:, span],
            leading_BCTHW=leading_BCTHW,
        )

    def commit(self, latents_BCTHW: Tensor) -> None:
        """Make the chunk history."""
        self._models.core.refresh(self._state, latents_BCTHW)

    def close(self) -> None:
        """Stop the drawing threads."""
        self._pool.shutdown(cancel_futures=True)


@torch.no_grad()
def roll_out(models: Models, walk: Walk, seed: int) -> Iterator[Tensor]:
    """Yield the latents of one chunk after another, fp32 [B, C, 5, H, W]."""
    sessions = Sessions(models, walk, seed)
    try:
        while sessions.chunk < walk.chunks:
            sessions.open()
            latents_BCTHW = sessions.denoise()
            sessions.commit(latents_BCTHW)
            yield latents_BCTHW
    finally:
        sessions.close()


class FrameStream:
    """Decoder memories of a batch; latents of whole chunks in, frames out."""

    def __init__(self, models: Models) -> None:
        self._vae = models.vae
        self._memories: list[Sequence[Tensor] | None] = []

    def copy(self) -> FrameStream:
        """Branch the stream; memories are never written in place."""
        twin = object.__new__(FrameStream)
        twin._vae, twin._memories = self._vae, list(self._memories)
        return twin

    @torch.no_grad()
    def decode(self, latents_BCTHW: Tensor) -> Tensor:
        """Decode one chunk: fp32 frames [B, 17, 3, 16 H, 16 W] in 0..1."""
        parts = latents_BCTHW.transpose(1, 2).split(_CLIPS_PER_CALL)
        memories = self._memories or [None] * len(parts)
        frames: list[Tensor] = []
        after: list[Sequence[Tensor] | None] = []
        for part, memory in zip(parts, memories, strict=True):
            made, last = self._vae.decode(part, memory)
            frames.append(made.float().clamp(0.0, 1.0))
            after.append(last)
        self._memories = after
        return torch.cat(frames)


@torch.no_grad()
def encode_chunk(models: Models, frames_BFCHW: Tensor) -> Tensor:
    """Encode 17 frames (or one) of each clip: normalised fp32 latents [B, C, T, H, W]."""
    dtype = models.vae.encoder.stem.weight.dtype
    parts = [models.vae.encode(part.to(dtype)) for part in frames_BFCHW.split(_CLIPS_PER_CALL)]
    return torch.cat(parts).transpose(1, 2)


def encode_pictures(models: Models, pictures_BCHW: Tensor) -> Tensor:
    """Encode first pictures as a session gets them, through 8 bits: [B, C, 1, H, W]."""
    rounded = from_uint8(to_uint8(pictures_BCHW))
    return encode_chunk(models, rounded[:, None])
