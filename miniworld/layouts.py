"""Layouts: which composite things stand where, for each kind of scene.

Owns: the recipes (trees, houses, gates, ...) that fill the primitive table and the ponds.
Invariants: a recipe is fixed per kind, so a thing keeps its rows; randomness is only in the
uniform numbers handed in, which makes a scene a pure function of them.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from miniworld import primitives as P

KINDS = ("forest", "city", "ruins", "rocks", "lake", "mixed")
UNIFORM_COUNT = 320
"""Uniform numbers that one scene may consume."""

_CELLS = 6  # 36 cells of 5.3 units: things keep apart without rejection sampling
_JITTER = 1.5

_Columns = dict[int, Tensor | float]


class _Builder:
    """Write composites of one scene kind into the primitive table, all scenes at once."""

    def __init__(self, uniform_CK: Tensor, ponds_CQ4: Tensor) -> None:
        self._uniform = iter(uniform_CK.unbind(1))
        count = uniform_CK.shape[0]
        self.rows = torch.zeros(count, P.PRIMITIVE_COUNT, P.COLUMN_COUNT)
        self._next = [0, P.FRUSTUM_START, P.ELLIPSOID_START]
        self._ponds = ponds_CQ4
        order = torch.stack([self.u() for _ in range(_CELLS**2)], 1).argsort(1)
        self._spots = iter(order.unbind(1))

    def u(self, low: float = 0.0, high: float = 1.0) -> Tensor:
        return low + (high - low) * next(self._uniform)

    def pick(self, *options: int) -> Tensor:
        table = torch.tensor(options, dtype=torch.float32)
        return table[(self.u() * len(options)).long().clamp(max=len(options) - 1)]

    def spot(self, probability: float) -> dict[str, Tensor]:
        """Take the next free cell: position, heading, and whether the thing is there."""
        cell = next(self._spots)
        size = P.PERIOD / _CELLS
        x = ((cell % _CELLS) + 0.5) * size + self.u(-_JITTER, _JITTER)
        z = ((cell // _CELLS) + 0.5) * size + self.u(-_JITTER, _JITTER)
        ponds = self._ponds
        dx = _wrap(x[:, None] - ponds[..., 0]) / (ponds[..., 2] + 0.9)
        dz = _wrap(z[:, None] - ponds[..., 1]) / (ponds[..., 3] + 0.9)
        is_dry = ((dx.square() + dz.square() > 1.0) | (ponds[..., 2] == 0.0)).all(1)
        present = (self.u() < probability) & is_dry
        return {"x": x, "z": z, "present": present.float()}

    def _write(self, kind: int, spot: dict[str, Tensor], columns: _Columns) -> None:
        row = self.rows[:, self._next[kind]]
        self._next[kind] += 1
        row[:, P.X], row[:, P.Z], row[:, P.PRESENT] = spot["x"], spot["z"], spot["present"]
        row[:, P.BRIGHTNESS] = 1.0
        for column, value in columns.items():
            row[:, column] = value

    def box(self, spot: dict[str, Tensor], columns: _Columns) -> None:
        self._write(0, spot, {P.TAPER: torch.ones(()), **columns})

    def frustum(self, spot: dict[str, Tensor], columns: _Columns) -> None:
        self._write(1, spot, columns)

    def ellipsoid(self, spot: dict[str, Tensor], columns: _Columns) -> None:
        self._write(2, spot, columns)

    def round_tree(self, probability: float = 0.95) -> None:
        spot, radius, base = self.spot(probability), self.u(0.7, 1.15), self.u(1.3, 1.6)
        self.frustum(spot, {P.HEIGHT: base + 0.4, P.A: 0.17, P.B: 0.12, P.COLOUR: P.WOOD})
        self.ellipsoid(spot, {
            P.BASE: base, P.HEIGHT: radius * self.u(1.5, 2.2), P.A: radius, P.B: radius,
            P.COLOUR: self.pick(P.LEAF_A, P.LEAF_A, P.LEAF_B), P.BRIGHTNESS: self.u(0.9, 1.15),
            P.PATTERN: P.FOLIAGE,
        })  # fmt: skip

    def fir(self, probability: float = 0.95) -> None:
        spot, height, radius = self.spot(probability), self.u(2.2, 3.6), self.u(0.7, 1.05)
        self.frustum(spot, {P.HEIGHT: 0.7, P.A: 0.16, P.B: 0.16, P.COLOUR: P.WOOD})
        self.frustum(spot, {
            P.BASE: 0.45, P.HEIGHT: height, P.A: radius, P.B: 0.0, P.COLOUR: P.LEAF_A,
            P.BRIGHTNESS: self.u(0.85, 1.1), P.PATTERN: P.FOLIAGE,
        })  # fmt: skip

    def spruce(self, probability: float = 0.95) -> None:
        spot, height, half = self.spot(probability), self.u(2.0, 3.4), self.u(0.6, 0.9)
        angle = self.u(0.0, math.pi)
        self.box(spot, {
            P.HEIGHT: 0.6, P.A: 0.14, P.B: 0.14, P.ANGLE: angle, P.COLOUR: P.WOOD,
        })  # fmt: skip
        self.box(spot, {
            P.BASE: 0.4, P.HEIGHT: height, P.A: half, P.B: half, P.ANGLE: angle, P.TAPER: 0.0,
            P.COLOUR: self.pick(P.LEAF_A, P.LEAF_B), P.BRIGHTNESS: self.u(0.9, 1.15),
            P.PATTERN: P.FOLIAGE,
        })  # fmt: skip

    def cypress(self, probability: float = 0.9) -> None:
        self.frustum(self.spot(probability), {
            P.HEIGHT: self.u(1.6, 3.0), P.A: self.u(0.45, 0.65), P.B: 0.0,
            P.COLOUR: self.pick(P.LEAF_A, P.LEAF_B), P.BRIGHTNESS: self.u(0.85, 1.1),
            P.PATTERN: P.FOLIAGE,
        })  # fmt: skip

    def bush(self, probability: float = 0.9) -> None:
        radius = self.u(0.4, 0.75)
        self.ellipsoid(self.spot(probability), {
            P.BASE: -0.25 * radius, P.HEIGHT: 1.5 * radius, P.A: radius, P.B: radius,
            P.COLOUR: P.LEAF_B, P.BRIGHTNESS: self.u(0.85, 1.1), P.PATTERN: P.FOLIAGE,
        })  # fmt: skip

    def rock(self, probability: float = 0.95, largest: float = 1.2) -> None:
        radius = self.u(0.4, largest)
        self.ellipsoid(self.spot(probability), {
            P.BASE: -0.35 * radius, P.HEIGHT: radius * self.u(1.3, 2.1), P.A: radius,
            P.B: radius * self.u(0.7, 1.0), P.COLOUR: P.STONE, P.BRIGHTNESS: self.u(0.85, 1.15),
        })  # fmt: skip

    def standing_stone(self, probability: float = 0.9) -> None:
        self.box(self.spot(probability), {
            P.HEIGHT: self.u(1.0, 3.2), P.A: self.u(0.25, 0.6), P.B: self.u(0.25, 0.45),
            P.ANGLE: self.u(0.0, math.pi), P.TAPER: self.u(0.45, 0.85), P.COLOUR: P.STONE,
            P.BRIGHTNESS: self.u(0.85, 1.15),
        })  # fmt: skip

    def pyramid(self, probability: float = 0.9) -> None:
        half = self.u(0.7, 1.5)
        self.box(self.spot(probability), {
            P.HEIGHT: half * self.u(1.0, 1.5), P.A: half, P.B: half, P.TAPER: 0.0,
            P.ANGLE: self.u(0.0, math.pi), P.COLOUR: self.pick(P.STONE, P.ACCENT),
            P.PATTERN: P.BANDS,
        })  # fmt: skip

    def house(self, probability: float = 0.95, tallest: float = 2.4) -> None:
        spot, height, angle = self.spot(probability), self.u(1.3, tallest), self.u(0.0, math.pi)
        a, b = self.u(0.75, 1.2), self.u(0.65, 1.0)
        self.box(spot, {
            P.HEIGHT: height, P.A: a, P.B: b, P.ANGLE: angle, P.PATTERN: P.WINDOWS,
            P.COLOUR: self.pick(P.PLASTER, P.PLASTER, P.STONE), P.BRIGHTNESS: self.u(0.9, 1.05),
        })  # fmt: skip
        self.box(spot, {
            P.BASE: height, P.HEIGHT: self.u(0.6, 1.1), P.A: a + 0.14, P.B: b + 0.14,
            P.ANGLE: angle, P.TAPER: self.u(0.0, 0.3), P.COLOUR: self.pick(P.ACCENT, P.WOOD),
        })  # fmt: skip

    def block(self, probability: float = 0.9) -> None:
        self.box(self.spot(probability), {
            P.HEIGHT: self.u(2.2, 4.4), P.A: self.u(0.6, 1.1), P.B: self.u(0.6, 1.0),
            P.ANGLE: self.u(0.0, math.pi), P.TAPER: self.u(0.85, 1.0), P.PATTERN: P.WINDOWS,
            P.COLOUR: self.pick(P.PLASTER, P.STONE, P.ACCENT), P.BRIGHTNESS: self.u(0.85, 1.05),
        })  # fmt: skip

    def tower(self, probability: float = 0.95) -> None:
        spot, height, radius = self.spot(probability), self.u(2.4, 4.4), self.u(0.5, 0.85)
        self.frustum(spot, {
            P.HEIGHT: height, P.A: radius, P.B: radius * 0.85, P.PATTERN: P.BANDS,
            P.COLOUR: self.pick(P.PLASTER, P.STONE), P.BRIGHTNESS: self.u(0.9, 1.1),
        })  # fmt: skip
        self.frustum(spot, {
            P.BASE: height, P.HEIGHT: self.u(0.8, 1.5), P.A: radius * 1.15, P.B: 0.0,
            P.COLOUR: P.ACCENT,
        })  # fmt: skip

    def column(self, probability: float = 0.9, shortest: float = 0.6) -> None:
        radius = self.u(0.22, 0.36)
        self.frustum(self.spot(probability), {
            P.HEIGHT: self.u(shortest, 3.2), P.A: radius, P.B: radius * 0.82,
            P.PATTERN: P.BANDS, P.COLOUR: self.pick(P.STONE, P.PLASTER),
            P.BRIGHTNESS: self.u(0.9, 1.1),
        })  # fmt: skip

    def spire(self, probability: float = 0.9) -> None:
        radius = self.u(0.4, 0.9)
        self.frustum(self.spot(probability), {
            P.HEIGHT: self.u(1.4, 4.2), P.A: radius, P.B: radius * self.u(0.1, 0.5),
            P.PATTERN: P.BANDS, P.COLOUR: P.STONE, P.BRIGHTNESS: self.u(0.85, 1.15),
        })  # fmt: skip

    def wall(self, probability: float = 0.9) -> None:
        self.box(self.spot(probability), {
            P.HEIGHT: self.u(0.7, 2.2), P.A: self.u(1.1, 2.0), P.B: self.u(0.16, 0.26),
            P.ANGLE: self.u(0.0, math.pi), P.PATTERN: P.BANDS,
            P.COLOUR: self.pick(P.STONE, P.PLASTER), P.BRIGHTNESS: self.u(0.85, 1.1),
        })  # fmt: skip

    def gate(self, probability: float = 0.95) -> None:
        spot, height, angle = self.spot(probability), self.u(2.1, 3.0), self.u(0.0, math.pi)
        half, radius = self.u(1.15, 1.5), self.u(0.22, 0.32)
        colour = self.pick(P.STONE, P.ACCENT)
        for side in (-1.0, 1.0):
            # The box's own x axis is (cos, -sin) in the ground plane.
            pillar = {
                "x": spot["x"] + side * half * angle.cos(),
                "z": spot["z"] - side * half * angle.sin(),
                "present": spot["present"],
            }
            self.frustum(pillar, {
                P.HEIGHT: height + 0.01, P.A: radius, P.B: radius * 0.9, P.PATTERN: P.BANDS,
                P.COLOUR: colour,
            })  # fmt: skip
        self.box(spot, {
            P.BASE: height, P.HEIGHT: self.u(0.35, 0.55), P.A: half + 0.55, P.B: radius + 0.1,
            P.ANGLE: angle, P.COLOUR: colour, P.BRIGHTNESS: 0.95,
        })  # fmt: skip

    def lamp(self, probability: float = 0.9) -> None:
        spot, height, radius = self.spot(probability), self.u(1.5, 2.0), self.u(0.26, 0.4)
        self.frustum(spot, {P.HEIGHT: height, P.A: 0.13, P.B: 0.08, P.COLOUR: P.WOOD})
        self.ellipsoid(spot, {
            P.BASE: height - 0.05, P.HEIGHT: 2.0 * radius, P.A: radius, P.B: radius,
            P.COLOUR: P.ACCENT, P.PATTERN: P.LAMP,
        })  # fmt: skip

    def orb(self, probability: float = 0.9) -> None:
        radius = self.u(0.45, 0.9)
        self.ellipsoid(self.spot(probability), {
            P.BASE: -0.1, P.HEIGHT: 2.0 * radius, P.A: radius, P.B: radius,
            P.COLOUR: self.pick(P.ACCENT, P.PLASTER), P.PATTERN: P.BANDS,
        })  # fmt: skip


def _wrap(offset: Tensor) -> Tensor:
    return offset - P.PERIOD * (offset / P.PERIOD).round()


def _repeat(count: int, add: Callable[[], None]) -> None:
    for _ in range(count):
        add()


def _forest(b: _Builder) -> None:
    _repeat(6, b.round_tree)
    _repeat(4, b.fir)
    _repeat(2, b.cypress)
    _repeat(3, b.bush)
    b.rock(0.8)
    b.house(0.6)
    _repeat(5, b.spruce)
    _repeat(2, lambda: b.standing_stone(0.6))


def _city(b: _Builder) -> None:
    _repeat(5, b.house)
    _repeat(4, b.block)
    _repeat(5, b.tower)
    _repeat(3, b.round_tree)
    _repeat(3, b.lamp)
    _repeat(2, b.bush)


def _ruins(b: _Builder) -> None:
    _repeat(6, b.wall)
    _repeat(3, b.gate)
    _repeat(10, b.column)
    _repeat(2, b.standing_stone)
    b.pyramid()
    _repeat(4, lambda: b.rock(0.8, 0.8))
    b.orb(0.6)
    _repeat(3, b.bush)


def _rocks(b: _Builder) -> None:
    _repeat(6, lambda: b.rock(0.95, 1.5))
    _repeat(4, b.orb)
    _repeat(7, b.standing_stone)
    _repeat(2, b.pyramid)
    _repeat(7, b.spire)
    _repeat(3, b.wall)
    _repeat(5, b.column)


def _lake(b: _Builder) -> None:
    _repeat(5, b.round_tree)
    _repeat(4, b.fir)
    _repeat(2, b.bush)
    _repeat(3, lambda: b.rock(0.9, 0.8))
    _repeat(2, b.house)
    _repeat(3, b.spruce)
    _repeat(2, b.standing_stone)
    _repeat(3, b.cypress)


def _mixed(b: _Builder) -> None:
    _repeat(2, b.house)
    _repeat(2, b.wall)
    b.gate()
    _repeat(2, b.standing_stone)
    b.pyramid(0.7)
    _repeat(3, b.round_tree)
    _repeat(2, b.fir)
    _repeat(2, b.tower)
    b.lamp()
    _repeat(2, b.column)
    _repeat(3, b.rock)
    b.orb()
    b.bush()


_RECIPES: dict[str, Callable[[_Builder], None]] = {
    "forest": _forest,
    "city": _city,
    "ruins": _ruins,
    "rocks": _rocks,
    "lake": _lake,
    "mixed": _mixed,
}
_POND_PROBABILITY = {"lake": (1.0, 1.0, 1.0), "mixed": (0.7, 0.0, 0.0)}


def _ponds(kind: str, uniform_CK: Tensor) -> Tensor:
    """Ponds [C, POND_COUNT, 4]: centre x, centre z, half axes; half axes of zero mean no pond."""
    u = uniform_CK.view(-1, P.POND_COUNT, 5)
    step = torch.arange(P.POND_COUNT) * (P.PERIOD / P.POND_COUNT)
    start = P.PERIOD * u[:, :1, :2]
    x = start[..., 0] + step + 2.0 * u[..., 0]
    z = start[..., 1] + 2.0 * step + 2.0 * u[..., 1]
    half = 1.8 + 1.8 * u[..., 2]
    probability = torch.tensor(_POND_PROBABILITY.get(kind, (0.2, 0.0, 0.0)))
    is_there = (u[..., 4] < probability).float()
    halves = torch.stack([half, half * (0.6 + 0.4 * u[..., 3])], -1) * is_there[..., None]
    return torch.cat([torch.stack([x, z], -1) % P.PERIOD, halves], -1)


def build(kind: str, uniform_CK: Tensor) -> tuple[Tensor, Tensor]:
    """Lay out scenes of one kind.

    uniform_CK: [C, UNIFORM_COUNT] in 0..1. Returns the primitive rows [C, N, columns] and the
    ponds [C, POND_COUNT, 4], positions in 0..PERIOD.
    """
    pond_numbers = 5 * P.POND_COUNT
    ponds = _ponds(kind, uniform_CK[:, :pond_numbers])
    builder = _Builder(uniform_CK[:, pond_numbers:], ponds)
    _RECIPES[kind](builder)
    rows = builder.rows
    rows[..., P.X] %= P.PERIOD
    rows[..., P.Z] %= P.PERIOD
    return rows, ponds
