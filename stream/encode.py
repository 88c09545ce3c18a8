"""`worldstream encode`: prompts with a picture, encoded ahead and kept.

Owns the order of the checks. A machine that has the kept encodings plays these prompts with this
picture without the encoder's weights, of which there are 50 GB.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from engine.config import Qwen3VlTextConfig, preset
from engine.errors import ConfigError
from stream.jobs import File, Text, check_prompt
from stream.world_spec import prompt_options, read_start, world_spec


@dataclass(frozen=True, kw_only=True)
class Encode:
    """Encode prompts of h3_33b with a first picture, and keep them for worlds to come."""

    prompt: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """At most 1000 characters; may come several times. By default the scene's own, or none."""
    image: File = None
    """First picture: a file, stretched to the model's size."""
    scene: Text = None
    """First picture: a named scene of the small world."""
    preset: str = "h3_33b"
    """Whose pictures and prompts."""
    size: Text = None
    """Picture size, such as 832x480, of those that the preset knows."""
    weights: File = None
    """Folder in which the encoder is, as `serve` has it."""
    prompt_encoder: File = None
    """Folder of the encoder alone."""
    prompt_residency: str = "free"
    """Where its weights stay: gpu, cpu, or free, which reads them for each prompt."""
    prompt_cache: File = None
    """Folder of encoded prompts; by default ~/.cache/worldstream/prompts."""
    refinement_prompt: bool = False
    """Encode the canonical prompt about looks."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    verbose: bool = False
    """Log to stderr: as text in a terminal, else as JSON lines."""

    def run(self) -> int:
        """Encode, and print rows and prompt of each."""
        spec = world_spec(
            self.preset,
            size=self.size,
            weights="random" if self.weights is None else self.weights,
            renderer=False,
            device=self.device,
            dtype="auto",
            prompts=prompt_options(
                encoder=self.prompt_encoder,
                residency=self.prompt_residency,
                cache=self.prompt_cache,
                refinement=self.refinement_prompt,
            ),
        )
        start = read_start(spec, image=self.image, scene=self.scene)
        prompts = [check_prompt(prompt) for prompt in self.prompt]

        from engine.checkpoint.folder import read_config
        from engine.device import resolve_device
        from engine.prompts.cached import find_files, open_prompts, residencies
        from stream.worlds import default_prompt, first_picture

        model = preset(spec.preset, spec.geometry).model
        beside: tuple[Path, ...] = ()
        if self.weights is not None:
            beside = (Path(self.weights),)
            model = read_config(beside[0], model)
        if not isinstance(model.text, Qwen3VlTextConfig):
            raise ConfigError(
                f"preset: {self.preset!r} has words of its own; allowed: one that reads a Qwen3-VL"
            )
        device = resolve_device(spec.engine.device)
        options = residencies(spec.engine.prompts, device)[0]
        files = find_files(model.text, model.text_dim, options, beside)
        encoder = open_prompts(files, model.text, options, device=device)
        picture_HWC = first_picture(start, spec.geometry)
        for prompt in prompts or [default_prompt(start)]:
            rows = encoder.encode(prompt, picture_HWC).rows_BRE.shape[1]
            print(f"{rows} rows: {prompt}", flush=True)
        encoder.close()
        return 0
