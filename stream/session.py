"""Session: what makes frames (a world), stepped chunk by chunk, under an epoch.

Owns the order of calls, the epoch, the digest of what was made. A `World` is the engine with its
decoder, or the renderer of the small world; every command and the service use the same `Session`.
Invariants: one step at a time and to its end; after `reset` frames of the old epoch no longer come.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from engine.config import FRAMES_PER_LATENT, SPARSE_STEPS, Geometry
from engine.errors import StateError
from engine.memory import window_bytes
from stream.trace import Digest

if TYPE_CHECKING:
    from torch import Tensor

    from engine.engine import Engine
    from engine.rollout import Rollout
    from engine.types import Action, StepTimings
    from graphs.runner import GraphRunner
    from stream.decode_lane import DecodeLane
    from vae_stream.decoder import DecoderState, FrameChunk, StreamingDecoder

LATENTS_PER_CHUNK = len(FRAMES_PER_LATENT)
_DECODER = "decoder."
_Each = TypeVar("_Each")
_LATENT_INDEX = f"{_DECODER}latent_index"


@dataclass(frozen=True, kw_only=True, slots=True)
class WorldState:
    """A world between two chunks, less its picture, prompt and seed."""

    tensors: Mapping[str, Tensor]
    """Shared with the world until it goes on."""
    values: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class WorldSpeed:
    """How passes run, as far as bits depend on it; see the fields of `EngineConfig`."""

    linear: str = "bf16"
    attention: str = "auto"
    sparse_tau: float = 1.0
    sparse_block: int = 64
    sparse_steps: int = SPARSE_STEPS
    kernels: str = "off"
    compile: str = "off"


class World(Protocol):
    """Turns actions into frames; holds one rollout at a time."""

    geometry: Geometry
    has_frames: bool
    """Whether steps yield frames; without a decoder there are latents only."""
    lookahead_latents: int
    """Latents of the next chunk that frames of a chunk may wait for; 0: steps yield all theirs."""
    digest_of: str
    """What the digest is taken over: "latents", or "frames" where there are none."""
    model_hash: str
    device: str
    dtype: str
    speed: WorldSpeed
    note: str
    """How device and dtype were chosen, in a phrase; empty where there was no choice."""
    is_finite: bool
    """Whether the last step made numbers throughout; known before its first frame comes out."""

    @property
    def attention_names(self) -> Mapping[str, str]:
        """Backend in use by group of rows; empty where nothing attends."""

    @property
    def runners(self) -> Mapping[str, GraphRunner]:
        """What records passes, by the part whose they are; for its figures, from any thread."""

    def begin(self, prompt: str, seed: int, digest: Digest) -> None:
        """Start a rollout; what it makes goes into `digest`."""

    def is_prompt_at_hand(self, prompt: str) -> bool:
        """Whether `set_prompt` would be done at once."""

    def prepare_prompt(self, prompt: str) -> None:
        """Do the slow part of `set_prompt` ahead; from any thread, while steps are made.

        Raises: ConfigError for a prompt that is not taken.
        """

    def set_prompt(self, prompt: str) -> None:
        """Change the prompt from the next chunk on."""

    def step(self, action: Action) -> Iterator[FrameChunk]:
        """Make one chunk and yield the frames that are due, latent by latent."""

    def finish(self) -> Iterator[FrameChunk]:
        """End the rollout: yield the frames that wait for a chunk which will not come."""

    @property
    def state_bytes(self) -> int:
        """About what `state` holds."""

    def state(self) -> WorldState:
        """Return where the rollout is, between two chunks."""

    def set_state(self, state: WorldState) -> None:
        """Move a rollout that began with the same picture and seed, and has the same prompt."""


class ModelWorld:
    """Engine and decoder, and the picture that rollouts start from.

    Args:
        engine: shared by worlds; one of them is in use at a time.
        decoder: None makes latents only.
        anchor_BCTHW: latent of the picture.
        picture_HWC: the picture, uint8 RGB, for a prompt encoder that looks at it.
        lane: of the decoder, for worlds that share it; None for one of its own.
    """

    def __init__(
        self,
        engine: Engine,
        decoder: StreamingDecoder | None,
        *,
        anchor_BCTHW: Tensor,
        picture_HWC: Tensor | None = None,
        lane: DecodeLane | None = None,
    ) -> None:
        from stream.decode_lane import DecodeLane

        self.geometry = engine.model_config.geometry
        self.has_frames = decoder is not None
        self.lookahead_latents = 0 if decoder is None else decoder.lookahead_latents
        self.decoder_name = "none" if decoder is None else decoder.name
        self.digest_of = "latents"
        self.model_hash = engine.model_hash
        self.device = str(engine.device)
        self.dtype = str(engine.dtype).removeprefix("torch.")
        config = engine.config
        self.speed = WorldSpeed(
            linear=config.linear, attention=config.attention, sparse_tau=config.sparse_tau,
            sparse_block=config.sparse_block, sparse_steps=config.sparse_steps,
            kernels=config.kernels, compile=config.compile,
        )  # fmt: skip
        self.note = engine.dtype_choice.reason
        self.is_finite = True
        self.timings: StepTimings | None = None
        """Of the last step, complete after its last frame. Its clock has marks of the decoder as
        well, see `DecodeLane.start`."""
        self._engine = engine
        self._decoder: StreamingDecoder | None = decoder
        self._lane = lane or DecodeLane(engine.device)
        self._anchor_BCTHW = anchor_BCTHW
        self._picture_HWC = picture_HWC
        self._rollout: Rollout | None = None
        self._decoder_state: DecoderState | None = None
        self._digest = Digest()

    @property
    def attention_names(self) -> Mapping[str, str]:
        """Of conditioning, audio and video rows."""
        return self._engine.core.attention.names

    @property
    def runners(self) -> Mapping[str, GraphRunner]:
        """Of the transformer and of the decoder, where they have one."""
        decoder = None if self._decoder is None else self._decoder.runner
        found = {"transformer": self._engine.runner, "decoder": decoder}
        return {part: runner for part, runner in found.items() if runner is not None}

    def begin(self, prompt: str, seed: int, digest: Digest) -> None:
        """Start a rollout and an empty decoder state."""
        self._digest = digest
        # Before the next ones are there, which take over their memory.
        self._lane.join()
        self._rollout = self._decoder_state = None
        self._rollout = self._engine.new_rollout(
            prompt, anchor_BCTHW=self._anchor_BCTHW, picture_HWC=self._picture_HWC, seed=seed
        )
        self._decoder_state = self._decoder.new_state() if self._decoder else None

    def is_prompt_at_hand(self, prompt: str) -> bool:
        """Whether the encoder has this prompt with this picture ready."""
        return self._engine.prompts.is_at_hand(prompt, self._picture_HWC)

    def prepare_prompt(self, prompt: str) -> None:
        """Encode, so that the encoder has it ready."""
        self._engine.prompts.encode(prompt, self._picture_HWC)

    def set_prompt(self, prompt: str) -> None:
        """Change the prompt; history keeps what it showed."""
        self._engine.set_prompt(self._begun(), prompt)

    def step(self, action: Action) -> Iterator[FrameChunk]:
        """Make one chunk; its latents enter the digest before the first frame comes out.

        It becomes history last, or on CUDA beside the decoder, once the first frames are decoded.
        """
        from engine.device import fetch

        rollout, is_cuda = self._begun(), self.device.startswith("cuda")
        chunk = self._engine.denoise(rollout, action)
        self.timings, latents_BCTHW = chunk.timings, chunk.latents_BCTHW
        frames: Iterator[FrameChunk] = iter(())
        if self._decoder is not None and self._decoder_state is not None:
            clock = chunk.timings.clock
            frames = self._lane.start(self._decoder, self._decoder_state, latents_BCTHW, clock)
        latents_on_host = fetch(latents_BCTHW)
        if is_cuda:
            # Not before the first frames are decoded, because somebody waits for them: beside the
            # refresh a pair of latents takes 54 ms (832x480 on an H200).
            self._lane.join()
            self._engine.commit(rollout, beside=True)
        # Behind the refresh: a device that waits for the host to launch it would stand still.
        host_BCTHW = latents_on_host()
        self.is_finite = bool(host_BCTHW.isfinite().all())
        self._digest.update(host_BCTHW)
        yield from frames
        if not is_cuda:
            self._engine.commit(rollout)
        self._engine.settle(rollout)

    def finish(self) -> Iterator[FrameChunk]:
        """End the stream of frames, not that of latents."""
        if self._decoder is not None and self._decoder_state is not None:
            yield from self._lane.flush(self._decoder, self._decoder_state)

    def swap_decoder(self, decoder: StreamingDecoder) -> tuple[FrameChunk, ...]:
        """Let another decoder go on from the next chunk; it knows nothing of those before.

        Returns the frames that the one before still owed; they come first.

        Raises:
            StateError: the world has no decoder, or no rollout.
        """
        rollout = self._begun()
        if self._decoder is None or self._decoder_state is None:
            raise StateError("swap_decoder: the world has latents only; expected one with frames")
        owed = self._lane.flush(self._decoder, self._decoder_state)
        self._lane.join()
        self._decoder, self.lookahead_latents = decoder, decoder.lookahead_latents
        self.decoder_name = decoder.name
        self._decoder_state = decoder.new_state(LATENTS_PER_CHUNK * rollout.chunk_index)
        return owed

    def take_density(self) -> float | None:
        """Return the share of blocks of keys that sparse attention read since the last call.

        Passes that read all of them do not count. Waits for the device. None where every pass does.
        """
        sparse = self._engine.core.attention.sparse
        return None if sparse is None else sparse.take_density()

    @property
    def state_bytes(self) -> int:
        """Window and state of the decoder."""
        decoder = 0 if self._decoder is None else self._decoder.state_bytes()
        return window_bytes(self._engine.model_config, self._engine.dtype.itemsize) + decoder

    def state(self) -> WorldState:
        """Return the cache, the camera, and the state of the decoder."""
        snapshot = self._engine.snapshot(self._begun())
        tensors = dict(snapshot.buffers)
        values = {"chunk_index": float(snapshot.chunk_index), **asdict(snapshot.camera)}
        self._lane.join()
        if self._decoder_state is not None:
            decoded = self._decoder_state.snapshot()
            values[_LATENT_INDEX] = float(decoded.latent_index)
            values |= {f"{_DECODER}{name}": float(each) for name, each in decoded.values.items()}
            tensors |= {f"{_DECODER}{name}": each for name, each in decoded.tensors.items()}
        return WorldState(tensors=tensors, values=values)

    def set_state(self, state: WorldState) -> None:
        """Move to a state of the same weights.

        Raises:
            StateError: it is of other weights.
        """
        from engine.camera import CameraState
        from engine.rollout import RolloutSnapshot
        from vae_stream.decoder import DecoderSnapshot

        values, decoder_values = _parted(state.values)
        buffers, memories = _parted(state.tensors)
        chunk_index = int(values.pop("chunk_index"))
        self._lane.join()
        if self._decoder_state is not None:
            latent_index = int(decoder_values.pop("latent_index"))
            decoded = DecoderSnapshot(
                latent_index=latent_index,
                values={name: int(value) for name, value in decoder_values.items()},
                tensors=memories,
            )
            try:
                self._decoder_state.restore(decoded)
            except ValueError as error:
                raise StateError(f"set_state: {error}") from error
        snapshot = RolloutSnapshot(
            chunk_index=chunk_index, camera=CameraState(**values), buffers=buffers
        )
        self._engine.restore(self._begun(), snapshot)

    def _begun(self) -> Rollout:
        if self._rollout is None:
            raise StateError("world: no rollout; expected begin() first")
        return self._rollout


def _parted(named: Mapping[str, _Each]) -> tuple[dict[str, _Each], dict[str, _Each]]:
    """Split what a state holds into the engine's and the decoder's, the latter by its own names."""
    engine, decoder = dict[str, _Each](), dict[str, _Each]()
    for name, each in named.items():
        if name.startswith(_DECODER):
            decoder[name.removeprefix(_DECODER)] = each
        else:
            engine[name] = each
    return engine, decoder


class Session:
    """One person's use of a world.

    Args:
        world: used by this session only, until the session is given up.
        prompt: what the world looks like, in words.
        seed: 0 to 2**64 - 1; the same seed, prompt, picture and actions make the same frames.
    """

    def __init__(self, world: World, *, prompt: str, seed: int) -> None:
        self._world = world
        self._prompt = prompt
        self._seed = seed
        self._is_stepping = False
        self.epoch = -1
        self.chunk_index = 0
        self.digest = Digest()
        self.reset()

    @property
    def world(self) -> World:
        """What makes the frames."""
        return self._world

    def reset(self, prompt: str | None = None, *, seed: int | None = None) -> int:
        """Begin anew at the first picture and return the new epoch."""
        self._prompt = self._prompt if prompt is None else prompt
        self._seed = self._seed if seed is None else seed
        self.epoch += 1
        self.chunk_index = 0
        self._is_stepping = False
        self.digest = Digest()
        self._world.begin(self._prompt, self._seed, self.digest)
        return self.epoch

    def switch_prompt(self, prompt: str) -> None:
        """Change the prompt from the next chunk on."""
        if self._is_stepping:
            raise StateError("switch_prompt: a step is under way; expected its last frame first")
        self._prompt = prompt
        self._world.set_prompt(prompt)

    def resume(self, state: WorldState, *, chunk_index: int, digest: str) -> None:
        """Go on where a session of the same picture, prompt and seed was.

        Raises:
            StateError: a step is under way, or the state is of another world.
        """
        if self._is_stepping:
            raise StateError("resume: a step is under way; expected its last frame first")
        self._world.set_state(state)
        self.digest.resume(digest)
        self.chunk_index = chunk_index

    def step(self, action: Action) -> Iterator[FrameChunk]:
        """Make one chunk and yield the frames that are due as each latent is decoded.

        Raises:
            StateError: the frames of the step before were not taken to the end.
        """
        if self._is_stepping:
            raise StateError("step: a step is under way; expected its last frame first")
        epoch = self.epoch
        self._is_stepping = True
        for frames in self._world.step(action):
            yield frames
            if epoch != self.epoch:
                return
        self._is_stepping = False
        self.chunk_index += 1

    def finish(self) -> Iterator[FrameChunk]:
        """Yield the frames that the last chunk still owes; nothing comes after but a reset.

        Raises:
            StateError: the frames of the step before were not taken to the end.
        """
        if self._is_stepping:
            raise StateError("finish: a step is under way; expected its last frame first")
        yield from self._world.finish()
