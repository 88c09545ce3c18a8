"""The seam between the engine and an implementation of softmax attention.

Owns `AttentionBackend` and the choice among backends. Invariant: a backend never falls back
silently; a refusal says why.
Shape suffixes: B batch, R query rows, S key rows, N heads, K head width.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from engine.config import BackendName
from engine.errors import ConfigError, UnsupportedError
from engine.kernels.sparse import KeySummary

if TYPE_CHECKING:
    from engine.attention.sparse import SparseAttention


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionNeed:
    """What a backend has to serve."""

    device_type: str
    dtype: torch.dtype
    head_dim: int
    capability: tuple[int, int] = (0, 0)
    """Of a CUDA device."""

    @classmethod
    def on(cls, device: torch.device, dtype: torch.dtype, head_dim: int) -> AttentionNeed:
        """Need of a model on a device."""
        is_cuda = device.type == "cuda"
        return cls(
            device_type=device.type,
            dtype=dtype,
            head_dim=head_dim,
            capability=torch.cuda.get_device_capability(device) if is_cuda else (0, 0),
        )

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype} on {self.device_type}, heads of {self.head_dim}"


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionShape:
    """One group of rows and what it sees."""

    group: str
    rows: int
    keys: int
    heads: int
    need: AttentionNeed

    def __str__(self) -> str:
        dtype = str(self.need.dtype).removeprefix("torch.")
        return f"{self.group} {self.rows}x{self.keys}x{self.heads}x{self.need.head_dim} {dtype}"


class AttentionBackend(Protocol):
    """Full attention without a mask, scale 1 / sqrt(K)."""

    name: str

    def refusal(self, need: AttentionNeed) -> str | None:
        """Return why the need cannot be served, or None."""
        ...

    def __call__(self, q_BRNK: Tensor, k_BSNK: Tensor, v_BSNK: Tensor) -> Tensor:
        """Return [B, R, N, K]."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionPlan:
    """Backend of each group of rows."""

    conditioning: AttentionBackend
    audio: AttentionBackend
    video: AttentionBackend
    sparse: SparseAttention | None = None
    """Of the video rows in the layers whose windows are summarized."""
    sparse_steps: int = 0
    """First denoise steps of a chunk that `sparse` serves."""

    @property
    def names(self) -> dict[str, str]:
        """Names by group."""
        return {
            "conditioning": self.conditioning.name,
            "audio": self.audio.name,
            "video": self.video.name if self.sparse is None else self.sparse.name,
        }

    @property
    def dense(self) -> AttentionPlan:
        """The same, reading everything."""
        return dataclasses.replace(self, sparse=None, sparse_steps=0)

    def is_sparse_at(self, step: int) -> bool:
        """Whether a denoise step reads a part of the window; a refresh never does."""
        return self.sparse is not None and step < self.sparse_steps

    def over_window(
        self, q_BRNK: Tensor, k_BSNK: Tensor, v_BSNK: Tensor, summary: KeySummary | None
    ) -> Tensor:
        """Return [B, R, N, K] of a chunk's rows, which are the last of the window.

        Args:
            q_BRNK: their queries.
            k_BSNK: of the window.
            v_BSNK: of the window.
            summary: of its past; None in a layer that reads all of it.
        """
        if self.sparse is None or summary is None:
            return self.video(q_BRNK, k_BSNK, v_BSNK)
        return self.sparse(q_BRNK, k_BSNK, v_BSNK, summary)

    @classmethod
    def of(cls, backend: AttentionBackend) -> AttentionPlan:
        """One backend for all."""
        return cls(conditioning=backend, audio=backend, video=backend)


def backends() -> dict[BackendName, AttentionBackend]:
    """All backends, whether this machine has them or not."""
    from engine.attention.dense import GluonBackend
    from engine.attention.flash import Fa3Backend, Fa4Backend, FlexBackend
    from engine.attention.sdpa import KernelBackend, MathBackend, ProductsBackend, SdpaBackend
    from engine.attention.split import SplitBackend

    return {
        "sdpa": SdpaBackend(),
        "cudnn": KernelBackend("cudnn", width_limit=128),
        "cudnn_split": SplitBackend(),
        "flash": KernelBackend("flash", width_limit=256),
        "flex": FlexBackend(),
        "fa3": Fa3Backend(),
        "fa4": Fa4Backend(),
        "gluon": GluonBackend(),
        "products": ProductsBackend(),
        "math": MathBackend(),
    }


def select_backend(need: AttentionNeed, prefer: BackendName = "auto") -> AttentionBackend:
    """Choose a backend; "auto" is the products for bfloat16 on a CPU and torch SDPA elsewhere.

    Raises: ConfigError for an unknown name, UnsupportedError with the backend's reason.
    """
    choices = backends()
    if prefer == "auto":
        is_bf16_cpu = need.device_type == "cpu" and need.dtype == torch.bfloat16
        prefer = "products" if is_bf16_cpu else "sdpa"
    if prefer not in choices:
        raise ConfigError(f"attention backend is {prefer!r}; allowed: auto, {', '.join(choices)}")
    backend = choices[prefer]
    reason = backend.refusal(need)
    if reason is not None:
        serving = [name for name, each in choices.items() if each.refusal(need) is None]
        raise UnsupportedError(
            f"attention backend {backend.name} refuses {need}: {reason}; allowed here: "
            f"{', '.join(['auto', *serving])}"
        )
    return backend
