"""Attention over all keys, by a kernel of our own for Hopper.

    dense   o = softmax(q K^T / sqrt(width)) V

Exact but for rounding: products in bf16, sums and weights in fp32, weights rounded to bf16 before
they meet the values, whichever way scores are spread. q, o are [B, R, N, K], k, v [B, S, N, K];
keys and values may be views with any strides of whole 16 bytes, dense in the last axis. Heads are
128 wide.
Owns the operator; `dense_gluon` has the kernel. It is not in the table of operators, whose kernels
an interpreter runs: Gluon has none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.kernels import contract

WIDTH = 128
"""Of a head."""
_ALIGNMENT_BYTES = 16
"""Of what the tensor memory accelerator reads."""


@torch.library.custom_op("worldstream::dense", mutates_args=())
def dense(q_BRNK: Tensor, k_BSNK: Tensor, v_BSNK: Tensor) -> Tensor:
    """Return the output, dense. Raises: ConfigError, UnsupportedError."""
    op = "dense"
    batch_size, _, heads, _ = q_BRNK.shape
    contract.require_kernels(op, q_BRNK)
    contract.require_rows(op, q=q_BRNK, k=k_BSNK, v=v_BSNK)
    if q_BRNK.dtype != torch.bfloat16 or q_BRNK.shape[-1] != WIDTH:
        raise ConfigError(
            f"{op}: q is {q_BRNK.dtype}, heads {q_BRNK.shape[-1]} wide; allowed: bfloat16, {WIDTH}"
        )
    if not q_BRNK.numel() or not k_BSNK.numel():
        raise ConfigError(
            f"{op}: q has shape {tuple(q_BRNK.shape)}, k {tuple(k_BSNK.shape)}; allowed: no axis "
            "of length 0"
        )
    for name, tensor in (("k", k_BSNK), ("v", v_BSNK)):
        contract.require_shape(op, name, tensor, (batch_size, k_BSNK.shape[1], heads, WIDTH))
        steps = (tensor.data_ptr(), *(step * tensor.element_size() for step in tensor.stride()[:3]))
        if any(step % _ALIGNMENT_BYTES for step in steps):
            raise ConfigError(
                f"{op}: {name} begins at {steps[0]:#x} with strides {steps[1:]} bytes; allowed: "
                f"multiples of {_ALIGNMENT_BYTES}"
            )
    from engine.kernels import dense_gluon

    return dense_gluon.dense(q_BRNK, k_BSNK, v_BSNK)


@dense.register_fake
def _(q_BRNK: Tensor, k_BSNK: Tensor, v_BSNK: Tensor) -> Tensor:
    return q_BRNK.new_empty(q_BRNK.shape)
