"""The pictures of README.md: ``python -m benchmarks.pictures``.

Owns the walk that they show. Invariant: they are frames of the shipped model, made by the command
that README.md names.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from PIL import Image

from stream.cli import main as worldstream

FOLDER = Path(__file__).parent / "pictures"
WALK = Path(__file__).parent.parent / "miniworld" / "walk.jsonl"
CHUNK_COUNT = 12
SHEET_EVERY_FRAMES = 17
SHEET_COLUMNS = 4


def contact_sheet(pictures: list[Image.Image], *, columns: int) -> Image.Image:
    """Return pictures of one size side by side, row by row."""
    width_px, height_px = pictures[0].size
    row_count = -(-len(pictures) // columns)
    sheet = Image.new("RGB", (columns * width_px, row_count * height_px))
    for index, picture in enumerate(pictures):
        row, column = divmod(index, columns)
        sheet.paste(picture, (column * width_px, row * height_px))
    return sheet


def main() -> None:
    """Write walk.gif and walk.png.

    Raises: SystemExit when the rollout fails.
    """
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        frames = Path(folder) / "frames"
        code = worldstream(
            [
                *("generate", "--scene", "meadow-forest", "--actions", str(WALK)),
                *("--chunks", str(CHUNK_COUNT), "--out", f"{folder}/walk.mp4", "--force"),
                *("--gif", str(FOLDER / "walk.gif"), "--png", str(frames)),
            ]
        )
        if code:
            raise SystemExit(code)
        paths = sorted(frames.iterdir())[SHEET_EVERY_FRAMES // 2 :: SHEET_EVERY_FRAMES]
        sheet = contact_sheet([Image.open(path) for path in paths], columns=SHEET_COLUMNS)
    sheet.save(FOLDER / "walk.png", optimize=True)


if __name__ == "__main__":
    main()
