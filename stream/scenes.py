"""Named scenes for the first screen: names, prompts, thumbnails.

Owns the process that draws them: the ray-caster needs torch, which the API process never imports,
so a child process draws every thumbnail once and ends. Its output is one JSON line a scene.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from dataclasses import dataclass

THUMBNAIL_LIMIT_S = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """A named scene and how it looks at its start."""

    name: str
    prompt: str
    png: bytes


async def draw_scenes(*, width_px: int, height_px: int) -> dict[str, Scene]:
    """Draw all named scenes in a child process.

    Raises:
        RuntimeError: the child failed; its message is the detail.
        TimeoutError: it took longer than `THUMBNAIL_LIMIT_S`.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "stream.scenes", str(width_px), str(height_px)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        output, message = await asyncio.wait_for(process.communicate(), THUMBNAIL_LIMIT_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise RuntimeError(message.decode(errors="replace").strip()[-300:])
    scenes: dict[str, Scene] = {}
    for line in output.splitlines():
        name, prompt, png = json.loads(line)
        scenes[name] = Scene(name=name, prompt=prompt, png=base64.b64decode(png))
    return scenes


def main(arguments: list[str]) -> None:
    """Print one line a scene: name, prompt, PNG in base64."""
    import io

    import torch
    from PIL import Image

    from engine.config import Geometry
    from miniworld.scene import NAMED_SCENES
    from stream.renderer import RendererWorld, scene_prompt

    torch.set_num_threads(1)
    geometry = Geometry(width_px=int(arguments[0]), height_px=int(arguments[1]))
    for name in NAMED_SCENES:
        picture_HWC = RendererWorld(name, geometry).first_picture()
        buffer = io.BytesIO()
        Image.fromarray(picture_HWC.numpy()).save(buffer, format="PNG")
        png = base64.b64encode(buffer.getvalue()).decode()
        print(json.dumps([name, scene_prompt(name), png]))


if __name__ == "__main__":
    main(sys.argv[1:])
