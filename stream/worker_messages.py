"""Messages between the API process and the worker: plain values, no torch.

Owns the commands (API process to worker, applied at chunk borders) and the reports (worker to API
process). They travel pickled over one pipe; frames do not, they lie in the ring.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from stream.actions import STALE_MS
from stream.frames import FrameMeta
from stream.world_spec import WorldSpec


class FailureCode(StrEnum):
    """Why a session or the worker stopped."""

    LOAD_FAILED = "LOAD_FAILED"
    """Weights, device or memory: the worker cannot run at all."""
    BAD_START = "BAD_START"
    """The first picture, the prompt or the trace to go on from cannot be used."""
    OUTPUT_NAN = "OUTPUT_NAN"
    OUTPUT_BLACK = "OUTPUT_BLACK"
    OUTPUT_FROZEN = "OUTPUT_FROZEN"
    GEN_FAILED = "GEN_FAILED"
    """A step raised."""
    GEN_TIMEOUT = "GEN_TIMEOUT"
    WORKER_DIED = "WORKER_DIED"


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerConfig:
    """What a worker serves, for all sessions."""

    world: WorldSpec
    trace_folder: Path
    """Traces go here as SESSION-eEPOCH.trace.jsonl."""
    warm_up_scene: str = "meadow-forest"
    fps: float = 24.0
    jit_margin_ms: float = 20.0
    """A chunk starts this much earlier than its cost asks for."""
    stale_ms: float = STALE_MS
    """Age at which held keys count as let go."""
    thread_count: int | None = None
    """Threads of torch; None leaves its own choice."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StartFrom:
    """First picture: exactly one of a named scene and a file that the server itself wrote."""

    scene: str | None = None
    image_path: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StartSession:
    """Open a world and show its first picture; a session before it ends."""

    session_id: str
    epoch: int = 0
    start: StartFrom
    prompt: str | None = None
    """None: the scene's own."""
    seed: int = 0
    is_paused: bool = False
    """True waits for `Resume` or `StepOnce` after the first picture."""
    first_frame_id: int = 1
    resume_trace: Path | None = None
    """Make the chunks of this trace again first; its prompt and seed count."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SetPrompt:
    """Change the prompt as soon as it is encoded, from the next chunk on."""

    id: int
    prompt: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Reset:
    """Begin anew under the next epoch; what is None stays. Several in a row act as one."""

    id: int
    start: StartFrom | None = None
    prompt: str | None = None
    """None: the same, or the scene's own where `start` names another scene."""
    seed: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Pause:
    """Make no more chunks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Resume:
    """Make chunks again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOnce:
    """Make one chunk, then pause."""

    id: int


@dataclass(frozen=True, kw_only=True, slots=True)
class EndSession:
    """Give the session up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptReady:
    """From the worker to itself: a prompt is encoded, or refused."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shutdown:
    """End the process."""


Command = (
    StartSession
    | SetPrompt
    | PromptReady
    | Reset
    | Pause
    | Resume
    | StepOnce
    | EndSession
    | Shutdown
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Loading:
    """Progress before `Ready`, and while a session is brought back from its trace."""

    stage: str
    percent: float
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """What will be loaded fits into memory; before anything is loaded."""

    text: str
    """The plan as a table."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """Loaded and warmed up."""

    device: str
    dtype: str
    model_hash: str
    width_px: int
    height_px: int
    fps: float
    chunk_ms: float
    """Cost of a chunk in a full window, measured by the warm-up."""
    linear: str
    """Scheme of the linears; empty without a model."""
    attention: str
    """Backends by group of rows; empty without a model."""
    rank_count: int = 1
    """Processes that share the world, the worker's own among them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionStarted:
    """A rollout began: a new session, a reset, or one brought back."""

    session_id: str
    epoch: int
    start: StartFrom
    prompt: str
    seed: int
    trace: Path
    restored_chunk_count: int = 0
    is_same_world: bool = True
    """False where a chunk made again has another digest than the trace says."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkStarted:
    """The action is latched, the model runs."""

    epoch: int
    chunk: int
    latch_ms: float
    act_seq: int
    lost_press_count: int
    """Presses that the mailbox could not hold until then."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameReady:
    """A frame lies in a slot of the ring."""

    slot: int
    meta: FrameMeta


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkDone:
    """Every frame of the chunk lies in the ring, its line in the trace."""

    epoch: int
    chunk: int
    denoise_ms: tuple[float, ...]
    refresh_ms: float
    first_frame_ms: float
    """From the latch to the first frame."""
    first_decode_ms: float
    """Of the first latent."""
    decode_ms: float
    """From the latents to the last frame, the wait for slots not included."""
    ring_wait_ms: float
    total_ms: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Applied:
    """A command with an id counts from this chunk on."""

    id: int
    epoch: int
    chunk: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """A command with an id changes nothing; `detail` is for the log, not for visitors."""

    id: int
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """Something went wrong; `detail` is for the log, not for visitors."""

    session_id: str | None
    code: FailureCode
    is_fatal: bool
    """Whether the worker is gone for good; otherwise only the session ended, or, for WORKER_DIED,
    a new worker goes on with it from its trace."""
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionEnded:
    """The session is given up and its trace complete."""

    session_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphUse:
    """What recording made of the passes of one part, since the part was loaded."""

    part: str
    """"transformer" or "decoder"."""
    replayed_count: int
    recorded_count: int
    plain_count: int
    """Not recorded yet, or never because that failed."""
    unlisted_count: int
    """Run plainly because such passes are not to be recorded."""
    refused_count: int
    """Recordings that failed."""
    evicted_count: int
    """Recordings that had to go."""
    entry_count: int
    """Recordings that there are."""
    held_bytes: int
    """Memory of these."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Heartbeat:
    """Once a second from a thread of its own."""

    busy_ms: float
    """How long the model has been at work since its last frame; 0 between chunks and while the ring
    is full."""
    device_bytes: int
    """Memory that it and its followers hold on their GPUs; 0 without any."""
    graphs: tuple[GraphUse, ...]
    """Of the parts whose passes are recorded; empty between two worlds."""
    follower_pids: tuple[int, ...] = ()
    """Processes that share its worlds."""


Report = (
    Loading
    | Planned
    | Ready
    | SessionStarted
    | ChunkStarted
    | FrameReady
    | ChunkDone
    | Applied
    | Refused
    | Failed
    | SessionEnded
    | Heartbeat
)
