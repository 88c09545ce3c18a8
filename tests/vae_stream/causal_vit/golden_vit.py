"""The golden data of the causal ViT decoder, and runs of ours with everything recorded.

WORLDSTREAM_GOLDEN_VAE names the folder of the complete set; without it the part in tests/data
serves, which has the first two layers and no pictures.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MethodType

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from tests.tiny import DATA
from vae_stream.causal_vit import CausalConfig, CausalVitDecoder, Mode, plain
from vae_stream.causal_vit.state import CausalVitState
from vae_stream.decoder import FrameChunk
from vae_stream.vit import Vit, VitConfig

FOLDER = Path(os.environ.get("WORLDSTREAM_GOLDEN_VAE", DATA))
_PREFIX = "golden_causal_vit_1_"
CASES = ("w4", "w4m", "w16", "w16s", "w16m")


@cache
def golden(name: str) -> dict[str, Tensor]:
    """Return a file of the set with its parts (_state, _raw0 ...), empty where it is not there."""
    tensors: dict[str, Tensor] = {}
    for part in ("", "_state", "_raw0"):
        path = FOLDER / f"{_PREFIX}{name}{part}.safetensors"
        if path.exists():
            tensors |= load_file(path)
    return tensors


def window_of(case: str) -> int:
    """Return the window that a case was made with."""
    with safe_open(FOLDER / f"{_PREFIX}{case}.safetensors", framework="pt") as file:
        return int(json.loads(file.metadata()["window"]))


def cases_with(start: str) -> list[str]:
    """Return the cases that hold a tensor whose name starts so."""
    return [case for case in CASES if any(name.startswith(start) for name in golden(case))]


def golden_vit(dtype: torch.dtype) -> Vit:
    """Return the golden weights; a head that the set leaves out is all zeros."""
    stored = golden("weights")
    weights = {
        name.removeprefix("weights."): tensor.float()
        for name, tensor in stored.items()
        if name.startswith("weights.")
    }
    vit = Vit(
        VitConfig(
            layer_count=len({name.split(".")[1] for name in weights if "blocks." in name}),
            head_count=2,
            ffn_width=512,
            latents_mean=tuple(stored["stats.latents_mean"].tolist()),
            latents_std=tuple(stored["stats.latents_std"].tolist()),
        )
    )
    missing, unexpected = vit.load_state_dict(weights, strict=False)
    assert not unexpected
    assert all(name.startswith(("norm_out.", "proj_out.")) for name in missing)
    return vit.cast_blocks(dtype).eval().requires_grad_(False)


@dataclass(kw_only=True, slots=True)
class Run:
    """All of a stream: tensors by golden name without "fp32.", raw frames and pictures."""

    decoder: CausalVitDecoder
    state: CausalVitState
    tensors: dict[str, Tensor] = field(default_factory=dict)
    raws: list[Tensor] = field(default_factory=list)
    """[3, 4C, 16h, 16w] of each call."""
    chunks: list[FrameChunk] = field(default_factory=list)
    chunk_calls: list[int] = field(default_factory=list)
    """Index of the call that gave each of `chunks`."""

    @property
    def raw(self) -> Tensor:
        """Raw frames of all calls."""
        return torch.cat(self.raws, dim=1)

    def push(self, latents_ZFHW: Tensor) -> None:
        """Decode latents."""
        for latent_FHW in latents_ZFHW:
            self._keep(self.decoder.push(self.state, latent_FHW[None]))

    def flush(self) -> None:
        """End the stream."""
        self._keep(self.decoder.flush(self.state))

    def _keep(self, chunks: tuple[FrameChunk, ...]) -> None:
        self.chunks += chunks
        self.chunk_calls += [len(self.raws) - 1] * len(chunks)


def new_run(
    case: str,
    mode: Mode,
    monkeypatch,
    *,
    dtype: torch.dtype = torch.float32,
    first_latent: int = 0,
) -> Run:
    """Begin a stream on the golden weights that records what it computes."""
    vit = golden_vit(dtype)
    height, width = golden(case)["in.z"].shape[2:]
    decoder = CausalVitDecoder(
        vit, height_px=16 * height, width_px=16 * width, mode=mode,
        causal=CausalConfig(window=window_of(case)),
    )  # fmt: skip
    run = Run(decoder=decoder, state=decoder.new_state(first_latent))
    tokens = height * width
    suffix_rows = vit.config.suffix_count
    attended: list[Tensor] = []
    attend, embed, head = plain.attend, vit.embed, vit.head

    def keep(name: str, rows_RX: Tensor) -> None:
        """Record rows of tokens, latent by latent, and of the suffix under its own name."""
        call = len(run.raws)
        kind, _, layer = name.partition(".")
        of_suffix = "suffix" if kind == "hidden" else f"suf_{kind}"
        at = f"c{call}{'.' + layer if layer else ''}"
        own_CRX = rows_RX[: len(rows_RX) // tokens * tokens].unflatten(0, (-1, tokens))
        run.tensors[f"{kind}.{at}"] = own_CRX
        run.tensors[f"{of_suffix}.{at}"] = rows_RX[-suffix_rows:]

    def recorded_attend(q_RNK, seen, suffix, plan):
        layer = len(attended) % vit.config.layer_count
        latents = (len(q_RNK) - suffix_rows) // tokens
        keep(f"q.L{layer}", q_RNK)
        for kind, rows_SRNK, last in zip("kv", seen, suffix, strict=True):
            keep(f"{kind}.L{layer}", torch.cat([rows_SRNK[-latents:].flatten(0, 1), last]))
        attended.append(attend(q_RNK, seen, suffix, plan))
        keep(f"attn.L{layer}", attended[-1])
        return attended[-1]

    def recorded_embed(self: Vit, z_BCTHW: Tensor) -> Tensor:
        x_BRD = embed(z_BCTHW)
        run.tensors[f"embed.c{len(run.raws)}"] = x_BRD[0].unflatten(0, (-1, tokens))
        z_BCTHW = z_BCTHW * self.latents_std + self.latents_mean
        run.tensors[f"post_quant.c{len(run.raws)}"] = self.post_quant_conv(z_BCTHW)[0]
        return x_BRD

    def recorded_head(self: Vit, x_BRD: Tensor, latents: int, height: int, width: int) -> Tensor:
        raw_BCTHW = head(x_BRD, latents, height, width)
        _keep_ring(run, latents)
        run.raws.append(raw_BCTHW[0])
        return raw_BCTHW

    def finish_of(layer: int, finish):
        def recorded_finish(self, x_BRD: Tensor, attention_BRD: Tensor) -> Tensor:
            x_BRD = finish(x_BRD, attention_BRD)
            keep(f"hidden.L{layer}", x_BRD[0])
            return x_BRD

        return recorded_finish

    monkeypatch.setattr(plain, "attend", recorded_attend)
    vit.embed, vit.head = MethodType(recorded_embed, vit), MethodType(recorded_head, vit)
    for layer, block in enumerate(vit.blocks):
        block.finish = MethodType(finish_of(layer, block.finish), block)
    return run


def _keep_ring(run: Run, latents: int) -> None:
    """Record the latents that the next call of the mode can see, oldest first."""
    state, past = run.state, run.decoder._past
    slots = state.slots(past, latents)[-past:]
    for name, ring_LSRD in (("k", state.buffers.keys_LSRD), ("v", state.buffers.values_LSRD)):
        for layer, ring_SRD in enumerate(ring_LSRD):
            ring_R = run.decoder._calls._plans[layer % 2].ring_R
            seen_SRD = torch.stack([ring_SRD[slot, ring_R] for slot in slots])
            run.tensors[f"ring_{name}.c{len(run.raws)}.L{layer}"] = seen_SRD.unflatten(-1, (2, 64))


def recorded_names(tensors: Mapping[str, Tensor], *starts: str, kind: str = "fp32") -> list[str]:
    """Return the names of golden tensors of these quantities, without their kind."""
    return [
        name.removeprefix(f"{kind}.")
        for name in sorted(tensors)
        if name.startswith(tuple(f"{kind}.{start}." for start in starts))
    ]


def subsampled(tensors: Mapping[str, Tensor], start: str) -> tuple[str, int]:
    """Return the name of raw frames in a file and how many pixels apart they were taken."""
    name = next(name for name in tensors if name == start or name.startswith(f"{start}_s"))
    return name, int(name.removeprefix(start).removeprefix("_s") or 1)


def decoded(case: str, monkeypatch, mode: Mode = Mode.PAIR, **options: object) -> Run:
    """Decode all latents of a case; an odd last one is flushed."""
    run = new_run(case, mode, monkeypatch, **options)
    run.push(golden(case)["in.z"])
    run.flush()
    return run


def assert_near(got: Tensor, expected: Tensor, atol: float) -> None:
    torch.testing.assert_close(got, expected, atol=atol, rtol=0)


def rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())
