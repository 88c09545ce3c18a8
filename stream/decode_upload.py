"""Process that decodes one uploaded picture: stdin to a PNG file.

Owns its own limits of memory and processor time, set before a byte is read. Exit codes: 0 written,
2 refused (reason on stderr).
"""

from __future__ import annotations

import io
import sys
from pathlib import Path


def main(arguments: list[str]) -> int:
    """Read a picture from stdin and write `path` at `width` x `height`."""
    path, width_px, height_px = Path(arguments[0]), int(arguments[1]), int(arguments[2])
    _limit()
    from PIL import Image

    from engine.errors import ConfigError
    from stream.images import decode_seed_image
    from stream.uploads import PIXEL_LIMIT, SIDE_LIMIT_PX

    data = sys.stdin.buffer.read()
    try:
        with Image.open(io.BytesIO(data), formats=("PNG", "JPEG", "WEBP")) as header:
            too_large = max(header.size) > SIDE_LIMIT_PX
            too_large |= header.width * header.height > PIXEL_LIMIT
            is_moving = getattr(header, "n_frames", 1) != 1
        if too_large or is_moving:
            raise ConfigError(f"picture: {header.size}, moving: {is_moving}; not allowed")
        picture = decode_seed_image(data, name="upload", width_px=width_px, height_px=height_px)
    except (ConfigError, OSError, SyntaxError, ValueError, EOFError, MemoryError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    Image.fromarray(picture.rgb_HWC).save(path, format="PNG")
    return 0


def _limit() -> None:
    try:
        import resource
    except ImportError:  # not on Windows; the parent's limit of time holds there too
        return
    from stream.uploads import DECODE_LIMIT_S, MEMORY_LIMIT_BYTES

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    limit_s = int(DECODE_LIMIT_S) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
