"""Seed images: a file from anywhere becomes one upright RGB picture of the model's size.

Owns the limits. Everything is checked from the header before a pixel is decoded, so that a small
file cannot ask for much memory. The picture is stretched to the model's size with Lanczos, without
cropping, as the released model's inference does. Transparent parts are laid over white; the EXIF
orientation is applied; grey, 16-bit, palette and CMYK pictures become 8-bit RGB; of a moving
picture the first frame counts.
"""

from __future__ import annotations

import hashlib
import io
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from engine.errors import ConfigError

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
FILE_LIMIT_BYTES = 64 * 1024 * 1024
PIXEL_LIMIT = 64_000_000
SIDE_MIN_PX = 32
SIDE_MAX_PX = 16_384
ASPECT_LIMIT = 4.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SeedImage:
    """First picture of a session and the digest of the file that it came from."""

    rgb_HWC: NDArray[np.uint8]
    sha256: str


def load_seed_image(path: str | Path, *, width_px: int, height_px: int) -> SeedImage:
    """Read a picture and bring it to `width_px` x `height_px`.

    Raises:
        ConfigError: the file is missing, no allowed picture, damaged, or outside the limits.
    """
    return decode_seed_image(
        _read(Path(path)),
        name=f"image: {str(path)!r}",
        width_px=width_px,
        height_px=height_px,
    )


def decode_seed_image(data: bytes, *, name: str, width_px: int, height_px: int) -> SeedImage:
    """Bring the bytes of a picture file to `width_px` x `height_px`; `name` begins messages.

    Raises:
        ConfigError: no allowed picture, damaged, or outside the limits.
    """
    with warnings.catch_warnings():
        # Pillow warns of large pictures; the limits below refuse them with a message of their own.
        warnings.simplefilter("ignore")
        try:
            image = Image.open(io.BytesIO(data), formats=FORMATS)
        except Image.DecompressionBombError as error:
            raise ConfigError(f"{name} has too many pixels; allowed: {PIXEL_LIMIT}") from error
        except UnidentifiedImageError as error:
            looks_like = "an HTML page" if _is_html(data) else "no picture"
            raise ConfigError(
                f"{name} is {looks_like}, or damaged; allowed: {', '.join(FORMATS)}"
            ) from error
        except (OSError, SyntaxError, ValueError, EOFError) as error:
            raise ConfigError(f"{name} is damaged: {_one_line(error)}") from error
        _check_size(image.width, image.height, name)
        try:
            rgb = _to_rgb(ImageOps.exif_transpose(image), name)
        except ConfigError:
            raise
        except (OSError, SyntaxError, ValueError, EOFError, IndexError) as error:
            raise ConfigError(f"{name} is truncated or damaged: {_one_line(error)}") from error
    resized = rgb.resize((width_px, height_px), Image.Resampling.LANCZOS)
    pixels: NDArray[np.uint8] = np.array(resized, dtype=np.uint8)
    return SeedImage(rgb_HWC=pixels, sha256=hashlib.sha256(data).hexdigest())


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(FILE_LIMIT_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"image: cannot read {str(path)!r}: {reason}") from error
    if not data:
        raise ConfigError(f"image: {str(path)!r} is empty (0 bytes)")
    if len(data) > FILE_LIMIT_BYTES:
        raise ConfigError(
            f"image: {str(path)!r} is larger than {FILE_LIMIT_BYTES // 2**20} MiB, the limit"
        )
    return data


def _check_size(width_px: int, height_px: int, name: str) -> None:
    size = f"{name} is {width_px} x {height_px}"
    if min(width_px, height_px) < SIDE_MIN_PX:
        raise ConfigError(f"{size}; allowed: sides of at least {SIDE_MIN_PX} px")
    if max(width_px, height_px) > SIDE_MAX_PX or width_px * height_px > PIXEL_LIMIT:
        raise ConfigError(
            f"{size}; allowed: sides up to {SIDE_MAX_PX} px, at most {PIXEL_LIMIT} pixels in all"
        )
    if max(width_px, height_px) > ASPECT_LIMIT * min(width_px, height_px):
        raise ConfigError(f"{size}; allowed: one side at most {ASPECT_LIMIT:g} times the other")


def _to_rgb(image: Image.Image, name: str) -> Image.Image:
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        return _grey_16_to_rgb(image, name)
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, rgba).convert("RGB")
    return image.convert("RGB")


def _grey_16_to_rgb(image: Image.Image, name: str) -> Image.Image:
    """Pillow would clip values above 255 to white; scale them instead."""
    grey_HW = np.asarray(image)
    if grey_HW.dtype.kind == "f" or grey_HW.min() < 0 or grey_HW.max() > 65_535:
        raise ConfigError(f"{name} has {image.mode} values; allowed: 8 or 16 bits a channel")
    eight_bit_HW = ((grey_HW.astype(np.uint32) * 255 + 32_767) // 65_535).astype(np.uint8)
    return Image.fromarray(eight_bit_HW).convert("RGB")


def _is_html(data: bytes) -> bool:
    head = data[:512].lstrip().lower()
    return head.startswith((b"<!doctype html", b"<html", b"<head", b"<body"))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:120]
