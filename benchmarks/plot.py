"""The ladder as a picture: how much of a chunk's time each row takes away.

Owns the drawing, by pillow alone. Invariant: a bar is as long as its time; what a row saved against
the one above it is the pale rest of the bar.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

_WIDTH_PX, _ROW_PX, _LABEL_PX, _MARGIN_PX, _VALUE_PX = 1200, 46, 330, 24, 250
_COLOURS = {"X": (38, 110, 158), "F": (58, 138, 92), "A": (196, 112, 36), "S": (150, 60, 110)}
_SAVED, _INK, _PALE, _PAPER = (226, 229, 233), (28, 30, 34), (110, 116, 124), (255, 255, 255)
CLASS_WORDS = {
    "X": "X: the same bits",
    "F": "F: other rounding",
    "A": "A: approximate",
    "S": "S: another schedule",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One row."""

    label: str
    row_class: str
    chunk_ms: float
    dit_fps: float


def draw_waterfall(bars: Sequence[Bar], *, title: str, caption: str) -> Image.Image:
    """Return the picture of at least one bar, the slowest as long as the picture allows."""
    height_px = 2 * _MARGIN_PX + 76 + _ROW_PX * len(bars) + 48
    image = Image.new("RGB", (_WIDTH_PX, height_px), _PAPER)
    draw = ImageDraw.Draw(image)
    large, plain, small = (ImageFont.load_default(size) for size in (24, 17, 14))
    draw.text((_MARGIN_PX, _MARGIN_PX), title, fill=_INK, font=large)
    room_px = _WIDTH_PX - 2 * _MARGIN_PX
    told = wrapped(caption, lambda line: draw.textlength(line, font=small) <= room_px)
    draw.multiline_text((_MARGIN_PX, _MARGIN_PX + 32), told, fill=_PALE, font=small)
    left_px = _MARGIN_PX + _LABEL_PX
    scale = (_WIDTH_PX - left_px - _MARGIN_PX - _VALUE_PX) / max(bar.chunk_ms for bar in bars)
    first_ms = above_ms = bars[0].chunk_ms
    for index, bar in enumerate(bars):
        top_px = _MARGIN_PX + 76 + index * _ROW_PX
        bottom_px = top_px + _ROW_PX - 12
        end_px = left_px + bar.chunk_ms * scale
        draw.text((_MARGIN_PX, top_px + 7), bar.label, fill=_INK, font=plain)
        if above_ms > bar.chunk_ms:
            saved_px = left_px + above_ms * scale
            draw.rectangle((end_px, top_px, saved_px, bottom_px), fill=_SAVED)
        draw.rectangle((left_px, top_px, end_px, bottom_px), fill=_COLOURS[bar.row_class])
        words = f"{bar.chunk_ms:.0f} ms  {bar.dit_fps:.1f} fps  {first_ms / bar.chunk_ms:.2f}x"
        value_px = left_px + max(above_ms, bar.chunk_ms) * scale + 10
        draw.text((value_px, top_px + 7), words, fill=_INK, font=plain)
        above_ms = bar.chunk_ms
    left_px, top_px = _MARGIN_PX, height_px - _MARGIN_PX - 20
    for name in dict.fromkeys(bar.row_class for bar in bars):
        draw.rectangle((left_px, top_px, left_px + 14, top_px + 14), fill=_COLOURS[name])
        draw.text((left_px + 22, top_px - 1), CLASS_WORDS[name], fill=_PALE, font=small)
        left_px += 200
    return image


def wrapped(words: str, fits: Callable[[str], bool]) -> str:
    """Break a line between words, each as late as it fits."""
    lines = [""]
    for word in words.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and not fits(longer):
            lines.append(word)
        else:
            lines[-1] = longer
    return "\n".join(lines)


def save_waterfall(path: Path, bars: Sequence[Bar], *, title: str, caption: str) -> None:
    """Write the picture as PNG."""
    draw_waterfall(bars, title=title, caption=caption).save(path, format="PNG", optimize=True)
