"""Optimisers and weight averages of the training stages.

Owns: Muon for matrix-like weights, its pairing with AdamW, fp32 masters, EMA, cosine.
Invariants: an optimiser only ever sees fp32 tensors; same-shaped matrices update in one batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

# Quintic Newton-Schulz coefficients. Source: Muon, kellerjordan.github.io/posts/muon
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_NEWTON_SCHULZ_STEPS = 5
# Update RMS of AdamW that Muon is scaled to. Source: Moonlight, arXiv 2502.16982, section 2.2
_MATCH_RMS = 0.2


def orthogonalise(update_BRC: Tensor) -> Tensor:
    """Return the nearest semi-orthogonal matrices of a batch `[B, rows, columns]`, in bf16.

    Five Newton-Schulz steps: singular values end in about 0.7..1.2, which is all that Muon needs.
    """
    x_BRC = update_BRC.bfloat16()
    is_tall = x_BRC.shape[1] > x_BRC.shape[2]
    if is_tall:
        x_BRC = x_BRC.mT
    x_BRC = x_BRC / (x_BRC.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = _NEWTON_SCHULZ
    for _ in range(_NEWTON_SCHULZ_STEPS):
        gram = x_BRC @ x_BRC.mT
        x_BRC = a * x_BRC + (b * gram + c * gram @ gram) @ x_BRC
    return x_BRC.mT if is_tall else x_BRC


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonalised updates; a weight is one or more stacked matrices.

    Args:
        params: fp32 tensors of two dimensions or more; all but the first are a matrix's columns.
        splits: into how many equal matrices each parameter's rows split (3 for a fused qkv).
        weight_decay: decoupled, times the learning rate.

    Raises:
        ValueError: a parameter has fewer than two dimensions, or rows that do not split evenly.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        splits: Iterable[int] | None = None,
        *,
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.01,
    ) -> None:
        all_params = list(params)
        all_splits = [1] * len(all_params) if splits is None else list(splits)
        groups: dict[tuple[torch.Size, int], list[Tensor]] = {}
        for param, split in zip(all_params, all_splits, strict=True):
            if param.dim() < 2 or split < 1 or param.shape[0] % split:
                raise ValueError(
                    f"params: shape {tuple(param.shape)} in {split} matrices; allowed: 2 or "
                    "more dimensions, split by a divisor of the first"
                )
            groups.setdefault((param.shape, split), []).append(param)
        super().__init__(
            [{"params": group, "splits": key[1]} for key, group in groups.items()],
            {"lr": lr, "momentum": momentum, "weight_decay": weight_decay},
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._step_group(group, params)
        return loss

    def _step_group(self, group: dict[str, Any], params: list[Tensor]) -> None:
        grads = [p.grad for p in params if p.grad is not None]
        buffers = []
        for param in params:
            state = self.state[param]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(param)
            buffers.append(state["momentum"])
        torch._foreach_lerp_(buffers, grads, 1 - group["momentum"])
        nesterov = torch._foreach_lerp(grads, buffers, group["momentum"])
        shape = params[0].shape
        rows = shape[0] // group["splits"]
        update_BRC = torch.stack([u.reshape(-1, rows, shape[1:].numel()) for u in nesterov])
        update_BRC = update_BRC.flatten(0, 1)
        scale = _MATCH_RMS * math.sqrt(max(update_BRC.shape[1:]))
        update = orthogonalise(update_BRC).float().mul_(scale).reshape(len(params), *shape)
        lr = group["lr"]
        torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
        torch._foreach_add_(params, list(update.unbind(0)), alpha=-lr)


def optimizer_pair(
    named_params: Iterable[tuple[str, Tensor]],
    muon_splits: Mapping[str, int],
    *,
    muon_lr: float,
    adamw_lr: float,
    betas: tuple[float, float] = (0.9, 0.95),
    weight_decay: float = 0.01,
) -> list[torch.optim.Optimizer]:
    """Return [AdamW, Muon]: Muon takes the names in `muon_splits`, AdamW all others.

    Each group carries `base_lr`, which `scale_learning_rate` multiplies.

    Raises:
        ValueError: a name in `muon_splits` is no parameter.
    """
    named = dict(named_params)
    unknown = sorted(set(muon_splits) - set(named))
    if unknown:
        raise ValueError(f"muon_splits: {unknown[0]!r} is no parameter; allowed: {sorted(named)}")
    rest = [p for name, p in named.items() if name not in muon_splits]
    on_gpu = all(p.is_cuda for p in rest)
    pair: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(
            rest, lr=adamw_lr, betas=betas, weight_decay=weight_decay, fused=on_gpu or None
        ),
        Muon(
            [named[name] for name in muon_splits],
            muon_splits.values(),
            lr=muon_lr,
            weight_decay=weight_decay,
        ),
    ]
    for optimizer in pair:
        for group in optimizer.param_groups:
            group["base_lr"] = group["lr"]
    return pair


def scale_learning_rate(optimizers: Iterable[torch.optim.Optimizer], scale: float) -> None:
    """Set each group's learning rate to `scale` times its `base_lr`."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["base_lr"] * scale


def cosine_scale(
    progress: float, step: int, *, warm_up_steps: int = 100, floor: float = 0.0
) -> float:
    """Return the learning-rate factor at `progress` 0..1 of the budget and at step `step`."""
    progress = min(max(progress, 0.0), 1.0)
    decay = floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))
    return min(1.0, (step + 1) / max(warm_up_steps, 1)) * decay


class MasterWeights:
    """fp32 masters of working weights; the identity where the working weights are fp32 already.

    Build the optimisers from `masters` (same order as `params`), call `backward` on the working
    weights, then `step`. Copies are foreach operations on fixed addresses and never synchronise.
    """

    def __init__(self, params: Iterable[Tensor]) -> None:
        self.working: list[Tensor] = list(params)
        self.is_identity = all(p.dtype == torch.float32 for p in self.working)
        self.masters: list[Tensor] = self.working
        if not self.is_identity:
            self.masters = [
                nn.Parameter(p.detach().float().clone(), requires_grad=p.requires_grad)
                for p in self.working
            ]
        self._grads: list[Tensor | None] = [None] * len(self.working)

    @torch.no_grad()
    def collect_grads(self) -> list[Tensor]:
        """Move the working gradients to the masters; return the fp32 gradients that exist."""
        if self.is_identity:
            return [p.grad for p in self.masters if p.grad is not None]
        targets, sources = [], []
        for index, (working, master) in enumerate(zip(self.working, self.masters, strict=True)):
            if working.grad is None:
                master.grad = None
                continue
            buffer = self._grads[index]
            if buffer is None:
                buffer = self._grads[index] = torch.empty_like(master)
            master.grad = buffer
            targets.append(buffer)
            sources.append(working.grad)
        if targets:
            torch._foreach_copy_(targets, sources)
        return targets

    @torch.no_grad()
    def step(
        self, optimizers: Iterable[torch.optim.Optimizer], *, max_norm: float | None = None
    ) -> Tensor:
        """Clip, step and copy back; return the gradient norm before clipping (0-d, no sync)."""
        grads = self.collect_grads()
        if not grads:
            raise RuntimeError("step: no weight has a gradient; call backward() first")
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        if max_norm is not None:
            torch._foreach_mul_(grads, (max_norm / (norm + 1e-6)).clamp(max=1.0))
        for optimizer in optimizers:
            optimizer.step()
        self.copy_back()
        return norm

    @torch.no_grad()
    def copy_back(self) -> None:
        """Round the masters into the working weights."""
        if not self.is_identity:
            torch._foreach_copy_(self.working, self.masters)

    def zero_grad(self) -> None:
        """Drop the working gradients."""
        for param in self.working:
            param.grad = None

    def state_dict(self) -> dict[str, list[Tensor]]:
        """Return the masters for a resumable checkpoint."""
        return {"masters": [p.detach() for p in self.masters]}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Sequence[Tensor]]) -> None:
        """Restore masters and working weights."""
        for master, saved in zip(self.masters, state["masters"], strict=True):
            master.copy_(saved)
        self.copy_back()


class Ema:
    """Exponential moving average of fp32 weights, with a warm-up so that it never lags the start.

    The decay of update i is min(decay, (1 + i) / (10 + i)).
    """

    def __init__(self, params: Iterable[Tensor], decay: float) -> None:
        self._params = list(params)
        self.decay = decay
        self.update_count = 0
        self.shadow = [p.detach().float().clone() for p in self._params]

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the present weights."""
        decay = min(self.decay, (1 + self.update_count) / (10 + self.update_count))
        torch._foreach_lerp_(self.shadow, [p.float() for p in self._params], 1 - decay)
        self.update_count += 1

    @torch.no_grad()
    def copy_to(self, params: Iterable[Tensor]) -> None:
        """Write the average into `params` (same order as at construction)."""
        for param, shadow in zip(params, self.shadow, strict=True):
            param.copy_(shadow)

    def state_dict(self) -> dict[str, Any]:
        """Return the average and its count for a resumable checkpoint."""
        return {"shadow": self.shadow, "update_count": self.update_count}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the average and its count."""
        for shadow, saved in zip(self.shadow, state["shadow"], strict=True):
            shadow.copy_(saved)
        self.update_count = int(state["update_count"])
