"""Sizes and inputs on which each operator is tested and measured.

Owns `Case`. Small cases have odd sizes and awkward strides and suit an interpreter; full ones are
those of a forward pass. Inputs are random, seeded, and made on the device that is asked for.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.config import SPARSE_BLOCKS
from engine.kernels import reference, sparse_reference
from engine.kernels.reference import Rounding
from engine.kernels.sparse import KeySummary
from engine.model.prope import projective


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Sizes of one call."""

    name: str
    dtype: torch.dtype
    rounding: Rounding = "eager"
    batch_size: int = 1
    rows: int
    runs: int
    """Runs of rows with a modulation or a camera of their own."""
    hidden: int
    heads: int
    width: int
    rotary: int
    inner: int
    is_full: bool = False

    @property
    def has_blocks(self) -> bool:
        """Whether all rows are whole blocks of channels."""
        widths = (self.hidden, self.heads * self.width, self.inner)
        return not any(width % reference.FP8_BLOCK for width in widths)

    def at(self, rounding: Rounding) -> Case:
        """Return the case with another rounding."""
        return dataclasses.replace(self, name=f"{self.name}-{rounding}", rounding=rounding)


def _small() -> list[Case]:
    tiny = Case(
        name="tiny", dtype=torch.bfloat16, batch_size=2, rows=5, runs=5, hidden=96, heads=2,
        width=128, rotary=96, inner=2208,
    )  # fmt: skip
    mini = Case(
        name="mini", dtype=torch.bfloat16, rows=3, runs=1, hidden=384, heads=6, width=64,
        rotary=48, inner=1024,
    )  # fmt: skip
    odd = Case(
        name="odd", dtype=torch.bfloat16, batch_size=2, rows=3, runs=3, hidden=41, heads=9,
        width=20, rotary=8, inner=9,
    )  # fmt: skip
    wide = dataclasses.replace(odd, name="odd-fp32", dtype=torch.float32)
    return [tiny.at("eager"), mini.at("eager"), mini.at("fast"), odd.at("fast"), wide]


def _full() -> list[Case]:
    h3 = Case(
        name="h3-832x480", dtype=torch.bfloat16, rows=1950, runs=5, hidden=5376, heads=56,
        width=128, rotary=96, inner=14336, is_full=True,
    )  # fmt: skip
    large = dataclasses.replace(h3, name="h3-1344x768", rows=5040, runs=1)
    return [case.at(rounding) for case in (h3, large) for rounding in ("eager", "fast")]


CASES = (*_small(), *_full())
SLIDE_LAYERS, SLIDE_SLOTS, SLIDE_PREFIX = 2, 5, 2
"""Of the caches that `slide` is tested and measured on; prefix in rows."""


class Source:
    """Random tensors of a case."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.device = case, device
        self._generator = torch.Generator(device).manual_seed(0)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return a dense tensor in the dtype of the case."""
        drawn = torch.randn(shape, generator=self._generator, device=self.device)
        return drawn.to(dtype or self.case.dtype)

    def rows(self, *tail: int) -> Tensor:
        """Return [B, R, *tail]; in small cases a view into wider rows."""
        case = self.case
        margin = 0 if case.is_full else 3
        return self.normal(case.batch_size, case.rows, *tail[:-1], tail[-1] + margin)[
            ..., : tail[-1]
        ]

    def modulation(self) -> Tensor:
        """Return [1, M, 6, D]."""
        return self.normal(1, self.case.runs, 6, self.case.hidden)

    def weight(self, width: int) -> Tensor:
        """Return the weight of a norm."""
        return 1.0 + 0.1 * self.normal(width)

    def tables(self) -> dict[str, Tensor]:
        """Return cosines and sines; both halves alike."""
        half = self.normal(self.case.rows, self.case.rotary // 2, dtype=torch.float32)
        angles = torch.cat([half, half], dim=1)
        return {
            "cos_RK": angles.cos().to(self.case.dtype),
            "sin_RK": angles.sin().to(self.case.dtype),
        }

    def cameras(self) -> Tensor:
        """Return views [1, G, 4, 4]: a rotation about the vertical and a walk."""
        angle = self.normal(1, self.case.runs, dtype=torch.float32)
        views = torch.eye(4, device=self.device).repeat(1, self.case.runs, 1, 1)
        views[..., 0, 0] = views[..., 2, 2] = angle.cos()
        views[..., 0, 2], views[..., 2, 0] = angle.sin(), -angle.sin()
        views[..., :3, 3] = self.normal(1, self.case.runs, 3, dtype=torch.float32)
        return views

    def slot(self, width: int) -> Tensor:
        """Return unwritten rows inside a buffer whose heads are outermost, as in the cache."""
        case = self.case
        shape = (case.batch_size, case.heads, case.rows + 4, width)
        buffer = torch.zeros(shape, dtype=case.dtype, device=self.device)
        return buffer.transpose(1, 2)[:, 2 : 2 + case.rows]


def adaln_inputs(case: Case, device: torch.device) -> dict[str, Any]:
    """Arguments of `norm_modulate`."""
    source = Source(case, device)
    return {
        "x_BRD": source.rows(case.hidden),
        "weight_D": source.weight(case.hidden),
        "modulation_BMPD": source.modulation(),
        "eps": 1e-5,
        "rounding": case.rounding,
    }


def add_norm_inputs(case: Case, device: torch.device) -> dict[str, Any]:
    """Arguments of `add_norm_modulate`."""
    source = Source(case, device)
    return {
        "x_BRD": source.rows(case.hidden),
        "branch_BRD": source.rows(case.hidden),
        "weight_D": source.weight(case.hidden),
        "modulation_BM6D": source.modulation(),
        "eps": 1e-5,
        "rounding": case.rounding,
    }


def add_norm_next_inputs(case: Case, device: torch.device) -> dict[str, Any]:
    """Arguments of `add_norm_modulate` between two blocks, whose modulations lie apart."""
    source, given = Source(case, device), add_norm_inputs(case, device)
    following = source.normal(case.batch_size, case.runs, 7, case.hidden)[:, :, 1:]
    return given | {"following_BMPD": following}


def add_gated_inputs(case: Case, device: torch.device) -> dict[str, Any]:
    """Arguments of `add_gated`."""
    given = add_norm_inputs(case, device)
    return {name: given[name] for name in ("x_BRD", "branch_BRD", "modulation_BM6D", "rounding")}


def place_inputs(case: Case, device: torch.device) -> dict[str, Any]:
    """Arguments of `place`: views of one joint projection, a slot of a cache, a slot of a ring."""
    source = Source(case, device)
    q, k, v = source.normal(case.batch_size, case.rows, 3, case.heads, case.width).unbind(2)
    camera = projective(source.cameras(), case.dtype)
    return {
        "q_BRNK": q,
        "k_BRNK": k,
        "v_BRNK": v,
        "q_weight_K": source.weight(case.width),
        "k_weight_K": source.weight(case.width),
        **source.tables(),
        "query_BG44": camera.query,
        "key_value_BG44": camera.key_value,
        "key_BRNK": source.slot(case.width),
        "value_BRNK": source.slot(case.width),
        "raw_BRNK": source.slot(case.rotary),
        "eps": 1e-5,
        "rounding": case.rounding,
    }


def rotate_inputs(case: Case, device: torch.device) -> dict[str, Any]:
    """Arguments of `rotate`."""
    source = Source(case, device)
    raw = source.slot(case.rotary)
    raw.copy_(source.normal(*raw.shape))
    return {
        "raw_BRNK": raw,
        **source.tables(),
        "key_BRNK": source.slot(case.width),
        "rounding": case.rounding,
    }


def slide_inputs(case: Case, device: torch.device) -> dict[str, Any]:
    """Arguments of `slide`: some layers of a cache; the oldest chunk is amid the ring.

    The last layer has summaries, of what was there before.
    """
    source, rows = Source(case, device), case.rows
    tables = [source.tables() for _ in range(SLIDE_SLOTS)]
    block = SPARSE_BLOCKS[-1 if case.is_full else 1]
    window_rows = SLIDE_PREFIX + (SLIDE_SLOTS + 1) * rows

    def layers(total_rows: int, width: int) -> list[Tensor]:
        shape = (case.batch_size, case.heads, total_rows, width)
        return [source.normal(*shape).transpose(1, 2) for _ in range(SLIDE_LAYERS)]

    # One row more than is used, as in the cache.
    keys, values = (
        [each[:, :window_rows] for each in layers(window_rows + 1, case.width)] for _ in range(2)
    )
    summary = KeySummary.of(keys[-1], SLIDE_PREFIX, block)
    sparse_reference.summarize(
        keys[-1], values[-1], summary.mean_BNJK, summary.sum_BNJK, summary.reach_BNJ, window_rows,
        block,
    )  # fmt: skip
    return {
        "keys_BSNK": keys,
        "values_BSNK": values,
        "raw_BSNK": layers(SLIDE_SLOTS * rows, case.rotary),
        "newest_BRNK": layers(rows, case.rotary),
        "cos_SK": torch.cat([each["cos_RK"] for each in tables]),
        "sin_SK": torch.cat([each["sin_RK"] for each in tables]),
        "mean_BNJK": [summary.mean_BNJK],
        "sum_BNJK": [summary.sum_BNJK],
        "reach_BNJ": [summary.reach_BNJ],
        "slot": 3,
        "block": block,
        "rounding": case.rounding,
    }


def turn_inputs(case: Case, device: torch.device) -> dict[str, Any]:
    """Arguments of `turn_output`; heads lie outermost, as some attentions return them."""
    source = Source(case, device)
    o = source.slot(case.width)
    o.copy_(source.normal(*o.shape))
    matrix = projective(source.cameras(), case.dtype).output
    return {"o_BRNK": o, "matrix_BG44": matrix, "start": case.rotary}


def absorb_inputs(case: Case, device: torch.device) -> dict[str, Any]:
    """Arguments of `absorb`: the last rows of a window, as many as there may be in full cases."""
    source = Source(case, device)
    keys = 127 if case.is_full else 5
    k, v = (source.normal(case.batch_size, keys, case.heads, case.width) for _ in range(2))
    shape = (case.batch_size, case.heads, case.rows)
    return {
        "o_BRNK": source.normal(case.batch_size, case.rows, case.heads, case.width),
        "lse_BNR": math.log(keys) + source.normal(*shape, dtype=torch.float32),
        "q_BRNK": source.rows(case.heads, case.width),
        "k_BSNK": k,
        "v_BSNK": v,
    }


def window_keys(case: Case) -> int:
    """Keys of a full window, its prefix as long as a chunk; some blocks of them in small cases."""
    return max(7 * case.rows, 329)


def summarize_inputs(case: Case, device: torch.device) -> dict[str, Any]:
    """Arguments of `summarize`: all keys of a window, heads outermost as in the cache."""
    source, keys = Source(case, device), window_keys(case)
    shape = (case.batch_size, case.heads, keys + 1, case.width)
    k, v = (source.normal(*shape).transpose(1, 2)[:, :keys] for _ in range(2))
    summary = KeySummary.of(k, case.rows, SPARSE_BLOCKS[-1])
    return {
        "k_BSNK": k,
        "v_BSNK": v,
        "mean_BNJK": summary.mean_BNJK,
        "sum_BNJK": summary.sum_BNJK,
        "reach_BNJ": summary.reach_BNJ,
        "rows": keys,
        "block": summary.block,
    }


def _summarized(case: Case, device: torch.device) -> dict[str, Any]:
    given = summarize_inputs(case, device)
    sparse_reference.summarize(**given)
    return given


def route_inputs(case: Case, device: torch.device) -> dict[str, Any]:
    """Arguments of `sparse.route`: a good half of the blocks is chosen."""
    given = _summarized(case, device)
    return {
        "q_BRNK": Source(case, device).rows(case.heads, case.width),
        "mean_BNJK": given["mean_BNJK"],
        "sink_1": torch.ones(1, dtype=torch.int32, device=device),
        "tally_2": torch.zeros(2, dtype=torch.int64, device=device),
        "keys": given["rows"],
        "tau": 0.5,
        "block": given["block"],
    }


def sparse_inputs(case: Case, device: torch.device) -> dict[str, Any]:
    """Arguments of `sparse.attend`, the blocks that are read key by key those of `route_inputs`."""
    given, routing = _summarized(case, device), route_inputs(case, device)
    own = sparse_reference.own_block(case.rows, routing.pop("keys"), given["block"])
    exact, listed, count = sparse_reference.route(**routing, own=own)
    routes = {"exact_BNTJ": exact, "list_BNTJ": listed, "count_BNT": count}
    del given["rows"]
    return {"q_BRNK": routing["q_BRNK"]} | given | routes


def dense_inputs(case: Case, device: torch.device) -> dict[str, Any]:
    """Arguments of `dense`: all keys of a window, heads outermost as in the cache."""
    given = summarize_inputs(case, device)
    q_BRNK = Source(case, device).rows(case.heads, case.width)
    return {"q_BRNK": q_BRNK, "k_BSNK": given["k_BSNK"], "v_BSNK": given["v_BSNK"]}


def swiglu_inputs(case: Case, device: torch.device) -> dict[str, Any]:
    """Arguments of `swiglu`."""
    return {"z_BRF": Source(case, device).rows(2 * case.inner), "rounding": case.rounding}


def quantize_inputs(case: Case, device: torch.device) -> dict[str, Any]:
    """Arguments of `quantize_rows`, one row of zeros among them."""
    x = Source(case, device).rows(case.hidden)
    x[:, 0] = 0.0
    return {"x": x}


def fp8_linear_inputs(
    case: Case, device: torch.device, *, in_blocks: bool = False
) -> dict[str, Any]:
    """Arguments of `fp8_linear`."""
    source = Source(case, device)
    codes, scale = reference.quantize_rows(source.rows(case.hidden), in_blocks)
    weight = source.normal(case.inner, case.hidden) * case.hidden**-0.5
    weight_codes, weight_scale = reference.quantize_weight(weight, in_blocks)
    return {
        "codes": codes,
        "scale": scale,
        "weight_NK": weight_codes,
        "weight_scale": weight_scale,
        "dtype": case.dtype,
    }


def in_blocks(
    inputs: Callable[[Case, torch.device], dict[str, Any]],
) -> Callable[[Case, torch.device], dict[str, Any]]:
    """Arguments of an operator that quantises in blocks."""
    return lambda case, device: inputs(case, device) | {"in_blocks": True}


def with_deltas(
    inputs: Callable[[Case, torch.device], dict[str, Any]], **deltas: str
) -> Callable[[Case, torch.device], dict[str, Any]]:
    """Arguments of an operator, and what is added to some of them: delta="branch_BRD"."""

    def made(case: Case, device: torch.device) -> dict[str, Any]:
        source, given = Source(case, device), inputs(case, device)
        added = {name: source.normal(*given[to].shape) for name, to in deltas.items()}
        return given | added

    return made
