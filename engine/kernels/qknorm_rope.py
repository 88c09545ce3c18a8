"""Everything between the projections of a block and its attention, each in one pass.

    place        q, k: norm a head, RoPE, PRoPE; v: PRoPE; k and v go straight into the cache slot
    rotate       rotary channels of keys, from their raw form, when their positions change
    turn_output  PRoPE of the attention output, heads side by side for the output projection

For a head of K channels, of which the first S are rotary: n = x rsqrt(mean x^2 + eps) weight;
r_j = n_j cos_j - n_{j+S/2} sin_j and r_{j+S/2} = n_{j+S/2} cos_j + n_j sin_j for j < S/2; each run
of four of the other channels is multiplied by the 4x4 matrix of its row. q, k, v are [B, R, N, K],
tables [R, S] of which the first half counts, matrices [B or 1, G, 4, 4] with G equal runs of rows.
Sums and all that is between load and store are fp32; see `reference` for `rounding`. All rows may
be views with any strides but a dense last axis, the slot as well; new outputs are contiguous.
Owns the operators; `qknorm_rope_triton` has the kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.errors import ConfigError, UnsupportedError
from engine.kernels import contract
from engine.kernels.reference import FP8_BLOCK


def check_head(op: str, width: int, start: int, *, in_blocks: bool = False) -> None:
    """Refuse heads that are no pairs and groups of four, or no whole parts of a block of channels.

    Raises: UnsupportedError.
    """
    if start % 2 or start < 2 or width <= start or (width - start) % 4:
        raise UnsupportedError(
            f"{op}: heads have {width} channels, {start} of them rotary; allowed: an even number, "
            "at least 2, that leaves a positive multiple of 4"
        )
    if in_blocks and FP8_BLOCK % width:
        raise UnsupportedError(
            f"{op}: heads of {width} channels in blocks; allowed: divisors of {FP8_BLOCK}"
        )


def _check_tables(op: str, rows: int, cos_RK: Tensor, sin_RK: Tensor) -> None:
    for name, table in (("cos", cos_RK), ("sin", sin_RK)):
        contract.require_shape(op, name, table, (rows, cos_RK.shape[-1]))
        contract.require_dense(op, name, table)


def _check_matrix(op: str, name: str, matrix_BG44: Tensor, batch_size: int, rows: int) -> None:
    contract.require_shape(op, name, matrix_BG44, (*matrix_BG44.shape[:2], 4, 4))
    contract.require_runs(op, name, matrix_BG44, batch_size, rows)
    if matrix_BG44.stride()[2:] != (4, 1):
        raise UnsupportedError(
            f"{op}: {name} has strides {matrix_BG44.stride()}; allowed: matrices that are dense"
        )


@torch.library.custom_op("worldstream::place", mutates_args=("key_BRNK", "value_BRNK", "raw_BRNK"))
def place(
    q_BRNK: Tensor,
    k_BRNK: Tensor,
    v_BRNK: Tensor,
    q_weight_K: Tensor,
    k_weight_K: Tensor,
    cos_RK: Tensor,
    sin_RK: Tensor,
    query_BG44: Tensor,
    key_value_BG44: Tensor,
    key_BRNK: Tensor,
    value_BRNK: Tensor,
    raw_BRNK: Tensor | None,
    eps: float,
    rounding: str,
    q_delta_BRNK: Tensor | None = None,
    k_delta_BRNK: Tensor | None = None,
    v_delta_BRNK: Tensor | None = None,
) -> Tensor:
    """Write k and v, and the normalised rotary channels of k, and return q.

    Args:
        q_BRNK: as projected, like k and v.
        k_BRNK: as above.
        v_BRNK: as above.
        q_weight_K: of the norm of q.
        k_weight_K: of the norm of k.
        cos_RK: cosines.
        sin_RK: sines.
        query_BG44: matrices of q.
        key_value_BG44: matrices of k and v.
        key_BRNK: where k goes.
        value_BRNK: where v goes.
        raw_BRNK: where the rotary channels of k go, [B, R, N, S]; None leaves them out.
        eps: of the norms.
        rounding: see `reference`.
        q_delta_BRNK: what is added to q first, contiguous; all three or none.
        k_delta_BRNK: as above.
        v_delta_BRNK: as above.

    Raises: ConfigError, UnsupportedError.
    """
    from engine.kernels import qknorm_rope_triton

    op, start = "place", cos_RK.shape[-1]
    batch_size, rows, _, width = q_BRNK.shape
    contract.require_kernels(op, q_BRNK)
    contract.require_rounding(op, rounding)
    check_head(op, width, start)
    slot = {"key": key_BRNK, "value": value_BRNK}
    contract.require_rows(op, q=q_BRNK, k=k_BRNK, v=v_BRNK, **slot)
    for name, tensor in {"k": k_BRNK, "v": v_BRNK, **slot}.items():
        contract.require_shape(op, name, tensor, tuple(q_BRNK.shape))
    deltas = (q_delta_BRNK, k_delta_BRNK, v_delta_BRNK)
    for name, delta in zip(("q delta", "k delta", "v delta"), deltas, strict=True):
        contract.require_delta(op, name, delta, q_BRNK)
    if len({delta is None for delta in deltas}) > 1:
        raise ConfigError(f"{op}: some of the deltas are None; allowed: all of them or none")
    if raw_BRNK is not None:
        contract.require_rows(op, q=q_BRNK, raw=raw_BRNK)
        contract.require_shape(op, "raw", raw_BRNK, (*q_BRNK.shape[:3], start))
    for name, weight_K in (("q weight", q_weight_K), ("k weight", k_weight_K)):
        contract.require_shape(op, name, weight_K, (width,))
        contract.require_dense(op, name, weight_K)
    _check_tables(op, rows, cos_RK, sin_RK)
    _check_matrix(op, "query", query_BG44, batch_size, rows)
    _check_matrix(op, "key_value", key_value_BG44, batch_size, rows)
    return qknorm_rope_triton.place(
        q_BRNK, k_BRNK, v_BRNK, q_weight_K, k_weight_K, cos_RK, sin_RK, query_BG44,
        key_value_BG44, key_BRNK, value_BRNK, raw_BRNK, eps, rounding == "eager",
        *deltas,
    )  # fmt: skip


@place.register_fake
def _(
    q_BRNK: Tensor,
    k_BRNK: Tensor,
    v_BRNK: Tensor,
    q_weight_K: Tensor,
    k_weight_K: Tensor,
    cos_RK: Tensor,
    sin_RK: Tensor,
    query_BG44: Tensor,
    key_value_BG44: Tensor,
    key_BRNK: Tensor,
    value_BRNK: Tensor,
    raw_BRNK: Tensor | None,
    eps: float,
    rounding: str,
    q_delta_BRNK: Tensor | None = None,
    k_delta_BRNK: Tensor | None = None,
    v_delta_BRNK: Tensor | None = None,
) -> Tensor:
    return q_BRNK.new_empty(q_BRNK.shape)


@torch.library.custom_op("worldstream::rotate", mutates_args=("key_BRNK",))
def rotate(
    raw_BRNK: Tensor, cos_RK: Tensor, sin_RK: Tensor, key_BRNK: Tensor, rounding: str
) -> None:
    """Write the first S channels of ``key_BRNK`` from ``raw_BRNK`` [B, R, N, S].

    Raises: ConfigError, UnsupportedError.
    """
    from engine.kernels import qknorm_rope_triton

    op, start = "rotate", cos_RK.shape[-1]
    contract.require_kernels(op, raw_BRNK)
    contract.require_rounding(op, rounding)
    contract.require_rows(op, raw=raw_BRNK, key=key_BRNK)
    check_head(op, key_BRNK.shape[-1], start)
    contract.require_shape(op, "raw", raw_BRNK, (*key_BRNK.shape[:3], start))
    _check_tables(op, key_BRNK.shape[1], cos_RK, sin_RK)
    qknorm_rope_triton.rotate(raw_BRNK, cos_RK, sin_RK, key_BRNK, rounding == "eager")


@rotate.register_fake
def _(raw_BRNK: Tensor, cos_RK: Tensor, sin_RK: Tensor, key_BRNK: Tensor, rounding: str) -> None:
    return None


def _check_turn(
    op: str, o_BRNK: Tensor, matrix_BG44: Tensor, start: int, *, in_blocks: bool = False
) -> None:
    contract.require_kernels(op, o_BRNK)
    contract.require_rows(op, o=o_BRNK)
    check_head(op, o_BRNK.shape[-1], start, in_blocks=in_blocks)
    _check_matrix(op, "matrix", matrix_BG44, o_BRNK.shape[0], o_BRNK.shape[1])


@torch.library.custom_op("worldstream::turn_output", mutates_args=())
def turn_output(o_BRNK: Tensor, matrix_BG44: Tensor, start: int) -> Tensor:
    """Return [B, R, N*K]. Raises: ConfigError, UnsupportedError."""
    from engine.kernels import qknorm_rope_triton

    _check_turn("turn_output", o_BRNK, matrix_BG44, start)
    return qknorm_rope_triton.turn_output(o_BRNK, matrix_BG44, start)


@turn_output.register_fake
def _(o_BRNK: Tensor, matrix_BG44: Tensor, start: int) -> Tensor:
    return o_BRNK.new_empty((*o_BRNK.shape[:2], o_BRNK.shape[2] * o_BRNK.shape[3]))


@torch.library.custom_op("worldstream::turn_output_fp8", mutates_args=())
def turn_output_fp8(
    o_BRNK: Tensor, matrix_BG44: Tensor, start: int, in_blocks: bool = False
) -> tuple[Tensor, Tensor]:
    """Return codes [B, R, N*K] and factors [B, R, 1], in blocks [B, R, N*K / 128].

    Raises: ConfigError, UnsupportedError.
    """
    from engine.kernels import qknorm_rope_triton

    op = "turn_output_fp8"
    _check_turn(op, o_BRNK, matrix_BG44, start, in_blocks=in_blocks)
    if in_blocks:
        contract.require_blocks(op, o_BRNK.shape[2] * o_BRNK.shape[3])
    return qknorm_rope_triton.turn_output_fp8(o_BRNK, matrix_BG44, start, in_blocks)


@turn_output_fp8.register_fake
def _(
    o_BRNK: Tensor, matrix_BG44: Tensor, start: int, in_blocks: bool = False
) -> tuple[Tensor, Tensor]:
    shape = (*o_BRNK.shape[:2], o_BRNK.shape[2] * o_BRNK.shape[3])
    return contract.new_quantized(o_BRNK, shape, in_blocks)
