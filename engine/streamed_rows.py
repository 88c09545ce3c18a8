"""Some rows of linears that lie in the machine's memory, and their products on a device.

Owns where the rows lie and how those of one layer after the other come to the device: through two
places, one of which is filled on a side stream while the other is read. Class X. Invariants: a
product has the shape, the place of its rows and the alignment of the one over all rows, so that the
same library does it in the same order; once the places are there nothing is allocated, and from
pinned memory the host waits for nothing.
Shape suffixes: B batch, N kept output channels, W all output channels, C input channels.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.side_work import SideWork

ALIGNMENT = 256
"""Bytes: what libraries of products look at when they choose a kernel; memory of its own has it."""
PIECE_BYTES = 128 * 2**20
"""torch rounds pinned memory up to a power of two, so that 174 MB of a layer would take 268."""

_GIB = 2**30
_log = logging.getLogger(__name__)


class HostBytes:
    """Memory of the machine in pieces, which come when they are written to.

    Args:
        size: bytes in all.
        pins: keep it where it is, so that a device reads it by itself; where the system refuses
            that, the rest is ordinary memory, which takes longer to read.
    """

    def __init__(self, size: int, *, pins: bool) -> None:
        self._size, self._pins = size, pins
        self._pieces: list[Tensor] = []
        self.pinned_bytes = 0

    def spans(self, start: int, size: int) -> Iterator[Tensor]:
        """Yield what lies from a byte on, piece by piece."""
        while size > 0:
            index, begin = divmod(start, PIECE_BYTES)
            while len(self._pieces) <= index:
                self._pieces.append(self._piece(len(self._pieces) * PIECE_BYTES))
            count = min(size, PIECE_BYTES - begin)
            yield self._pieces[index][begin : begin + count]
            start, size = start + count, size - count

    def _piece(self, start: int) -> Tensor:
        size = min(PIECE_BYTES, self._size - start)
        if self._pins:
            try:
                piece = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                self._pins = False
                _log.warning(
                    "memory_not_pinned gib=%.2f of_gib=%.2f: %s", (self._size - start) / _GIB,
                    self._size / _GIB, str(error).partition("\n")[0],
                )  # fmt: skip
            else:
                self.pinned_bytes += size
                return piece
        return torch.empty(size, dtype=torch.uint8)


class StreamedRows:
    """The last rows of one linear a layer, all of the same shape.

    Args:
        layers: count.
        kept: rows of each that are kept.
        like_WC: weight of one, for the other sizes, dtype and device.
    """

    def __init__(self, layers: int, kept: int, like_WC: Tensor) -> None:
        self._layers, self._kept = layers, kept
        self._shape, self._dtype, self._device = like_WC.shape, like_WC.dtype, like_WC.device
        size = kept * (like_WC.shape[1] + 1) * like_WC.itemsize
        self._stride = _aligned(size, ALIGNMENT)
        self._host = HostBytes(layers * self._stride, pins=self._device.type == "cuda")
        self._side = SideWork(self._device)
        self._weights_WC: list[Tensor] = []
        self._biases_W: list[Tensor] = []
        self._newest, self._place = -1, 0

    @property
    def gib(self) -> float:
        """Of the machine's memory."""
        return self._layers * self._stride / _GIB

    @property
    def pinned_gib(self) -> float:
        """Of that, what a device reads by itself."""
        return self._host.pinned_bytes / _GIB

    def keep(self, layer: int, weight_WC: Tensor, bias_W: Tensor) -> None:
        """Begin to copy the last rows of a layer; the device may free the tensors at once."""
        self._move(layer, (weight_WC, bias_W), to_host=True)

    def open(self) -> None:
        """Make the places on the device, once every layer is kept; wait until all are there.

        Before each place lie as many rows as a linear has before those that are kept. Nobody reads
        their products, so the first place may lie among those before the second, whatever is being
        written there.
        """
        rows, width = self._shape
        step = _aligned(self._kept * width, ALIGNMENT // self._dtype.itemsize)
        memory = torch.zeros(step + rows * width, dtype=self._dtype, device=self._device)
        self._weights_WC = [
            memory[start : start + rows * width].view(rows, width) for start in (0, step)
        ]
        self._biases_W = [
            torch.zeros(rows, dtype=self._dtype, device=self._device) for _ in range(2)
        ]
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self._bring(0)

    def product(self, layer: int, x_BC: Tensor) -> Tensor:
        """Return x times a layer's rows, and their bias [B, N]; layers are best asked for in order.

        While that is computed, and whatever else is launched before the next layer, the next
        layer's rows come to the other place; after the last layer those of the first.
        """
        if self._newest != layer:
            self._bring(layer)
        self._side.join()
        place = self._place
        self._bring((layer + 1) % self._layers)
        out_BW = F.linear(x_BC, self._weights_WC[place], self._biases_W[place])
        return out_BW[:, -self._kept :].clone()

    def _bring(self, layer: int) -> None:
        """Fill the place that is not the newest, after whatever read it."""
        self._newest, self._place = layer, 1 - self._place
        weight_WC, bias_W = self._weights_WC[self._place], self._biases_W[self._place]
        with self._side.beside(weight_WC, bias_W):
            self._move(layer, (weight_WC, bias_W), to_host=False)

    def _move(self, layer: int, tensors: tuple[Tensor, ...], *, to_host: bool) -> None:
        start = layer * self._stride
        for tensor in tensors:
            there = tensor[-self._kept :].reshape(-1).view(torch.uint8)
            for here in self._host.spans(start, there.numel()):
                part, there = there[: here.numel()], there[here.numel() :]
                source, target = (part, here) if to_host else (here, part)
                target.copy_(source, non_blocking=True)
            start += tensor[-self._kept :].nbytes


def _aligned(size: int, to: int) -> int:
    return -(-size // to) * to
