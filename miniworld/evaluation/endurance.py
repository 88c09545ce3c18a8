"""Items of the quality table without a frame-by-frame truth: long sessions and foreign pictures.

Owns one function an item. A long rollout is its own world, so it is compared with the truth along
the same path in what any walk through that world and style shares: brightness, contrast, motion,
sharpness, things in view.

Shape suffixes: B clips, F frames, C channels or colours, H height, W width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from engine.camera import camera_indices, relative_views
from miniworld import walks
from miniworld.evaluation import metrics
from miniworld.evaluation.cases import HELD_OUT_SEED, YAW, Cases, mixed_cases
from miniworld.evaluation.figures import Report, Sheet, median, share
from miniworld.evaluation.models import (
    FrameStream,
    Models,
    Walk,
    encode_chunk,
    encode_pictures,
    roll_out,
)
from miniworld.evaluation.presence import NOT_EMPTY_SHARE, busy_share
from miniworld.evaluation.quality import Settings
from miniworld.photos import synthetic_photos
from vae_stream.geometry import BLOCK_FRAMES, BLOCK_LATENTS

FRAMES_PER_SECOND = 24
_SHEET_ROWS = 10
_WARM_UP_CHUNKS = 2
"""Chunks decoded before one that is looked at: the decoder remembers less than two."""
_PRESENCE_FRAMES = (0, 8, 16)

# Collapse, against the truth along the same path or the first picture. Wide on purpose: a world of
# its own may be darker or calmer, but not black, white, flat or frozen.
BRIGHTNESS_BOUND = 0.2
CONTRAST_BOUNDS = (0.4, 2.5)
MOTION_BOUNDS = (0.3, 3.0)

OUTSIDE_COUNT = 8
_OUTSIDE_NAMES = ("astronaut", "chelsea", "coffee", "rocket", "motorcycle_left")
"""Pictures that scikit-image carries in itself, where it is installed."""


def _frames_at(
    models: Models, walk: Walk, seed: int, chunks: Sequence[int]
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Roll out to the end and yield (chunk from 1, latents, frames) at the chunks asked for."""
    stream, decoded = FrameStream(models), -1
    for chunk, latents in enumerate(roll_out(models, walk, seed), start=1):
        if not any(0 <= wanted - chunk <= _WARM_UP_CHUNKS for wanted in chunks):
            continue
        if decoded != chunk - 1:
            stream = FrameStream(models)
        frames, decoded = stream.decode(latents), chunk
        if chunk in chunks:
            yield chunk, latents, frames


def _seconds(chunk: int) -> str:
    return f"{round(chunk * BLOCK_FRAMES / FRAMES_PER_SECOND)} s"


def measure_long(models: Models, settings: Settings, report: Report) -> None:
    """Sixty seconds of mixed scripts."""
    last = settings.long_chunks[-1]
    cases = mixed_cases(models, settings.cases, last, 8 + settings.seed)
    sheet, first_std = Sheet(scale=1.0), math.nan
    walk = cases.walk()
    for chunk, latents, frames in _frames_at(models, walk, 8 + settings.seed, settings.long_chunks):
        truth = cases.truth(chunk - 1, settings.frames)
        made, is_last, at = frames[:, settings.frames], chunk == last, _seconds(chunk)
        count = len(made)
        difference = (metrics.brightness(made) - metrics.brightness(truth)).abs()
        report.add("long", f"brightness difference of a clip, mean, {at}", difference.mean(),
                   count=count, at_most=0.06 if is_last else None)  # fmt: skip
        report.add("long", f"brightness difference, worst clip, {at}", difference.max(),
                   count=count)  # fmt: skip
        report.add("long", f"motion / truth, {at}",
                   metrics.motion(made).mean() / metrics.motion(truth).mean(), count=count,
                   at_least=0.7 if is_last else None)  # fmt: skip
        report.add("long", f"contrast / truth, {at}",
                   metrics.contrast(made).mean() / metrics.contrast(truth).mean(),
                   count=count)  # fmt: skip
        deviation = float(latents.std())
        first_std = deviation if chunk == settings.long_chunks[0] else first_std
        report.add("long", f"latent deviation / chunk 1, {at}", deviation / first_std, count=count,
                   at_least=0.95 if is_last else None,
                   at_most=1.05 if is_last else None)  # fmt: skip
        _report_presence(report, cases, chunk, frames, at, is_last=is_last)
        sheet.column(frames[:_SHEET_ROWS, BLOCK_FRAMES // 2])
        if is_last:
            reference, true = cases.round_trip(chunk - 1)
            report.add("long", f"sharpness / VAE round trip, {at}",
                       metrics.sharpness_ratio(frames, reference), count=count,
                       at_least=0.9, at_most=1.1)  # fmt: skip
            report.add("long", f"strength of edges / VAE round trip, {at}",
                       metrics.edge_ratio(frames, reference), count=count)  # fmt: skip
            true_change = (
                encode_chunk(models, true).std() / encode_chunk(models, cases.truth(0)).std()
            )
            report.add("long", f"latent deviation of the truth / chunk 1, {at}", true_change,
                       count=count)  # fmt: skip
            report.add("long", f"change of latent deviation / that of the truth, {at}",
                       deviation / first_std / float(true_change), count=count)  # fmt: skip
    settings.save(sheet, "long")


def _report_presence(
    report: Report, cases: Cases, chunk: int, frames: Tensor, at: str, *, is_last: bool
) -> None:
    empty = cases.empty(chunk - 1, _PRESENCE_FRAMES)
    made = busy_share(frames[:, _PRESENCE_FRAMES], empty)
    true = busy_share(cases.truth(chunk - 1, _PRESENCE_FRAMES), empty)
    report.add("long", f"clips not empty, {at}", share(made >= NOT_EMPTY_SHARE), count=len(made),
               at_least=0.8 if is_last else None)  # fmt: skip
    report.add("long", f"clips not empty, truth, {at}", share(true >= NOT_EMPTY_SHARE),
               count=len(made))  # fmt: skip
    report.add("long", f"busy cells / truth, {at}", made.mean() / true.mean(), count=len(made))


def measure_endless(models: Models, settings: Settings, report: Report) -> None:
    """Ten minutes of mixed scripts, a few clips."""
    last = settings.endless_chunks[-1]
    count = max(2, settings.cases // 16)
    cases = mixed_cases(models, count, last, 9 + settings.seed)
    sheet = Sheet(scale=1.0)
    looks = []
    walk = cases.walk()
    for chunk, _, frames in _frames_at(models, walk, 9 + settings.seed, settings.endless_chunks):
        truth = cases.truth(chunk - 1, settings.frames)
        made, at = frames[:, settings.frames], _seconds(chunk)
        difference = (metrics.brightness(made) - metrics.brightness(truth)).abs()
        contrast = metrics.contrast(made) / metrics.contrast(truth).clamp(min=1e-6)
        # One clip may stand still for a chunk, so motion is that of all clips together.
        moving = metrics.motion(made).mean() / metrics.motion(truth).mean().clamp(min=1e-6)
        looks.append(_is_alive(difference, contrast))
        report.add("endless", f"brightness difference, worst clip, {at}", difference.max(),
                   count=count)  # fmt: skip
        report.add("endless", f"contrast / truth, least clip, {at}", contrast.min(), count=count)
        report.add("endless", f"motion / truth, {at}", moving, count=count,
                   at_least=MOTION_BOUNDS[0] if chunk == last else None,
                   at_most=MOTION_BOUNDS[1] if chunk == last else None)  # fmt: skip
        sheet.column(frames[:_SHEET_ROWS, BLOCK_FRAMES // 2])
    _report_collapse(report, "endless", looks, last)
    settings.save(sheet, "endless")


def _is_alive(brightness_difference_B: Tensor, contrast_ratio_B: Tensor) -> Tensor:
    low, high = CONTRAST_BOUNDS
    # A value that is not a number fails every comparison.
    return (
        (brightness_difference_B <= BRIGHTNESS_BOUND)
        & (contrast_ratio_B >= low)
        & (contrast_ratio_B <= high)
    )


def _report_collapse(report: Report, item: str, looks: Sequence[Tensor], last: int) -> None:
    """Report collapse: out of bounds at both of the last two looks.

    One look out of bounds may be a face against a wall, since nothing stops these walks in the
    model's own world; a collapsed rollout does not come back.
    """
    count = len(looks[-1])
    report.add(item, "single views within bounds", share(torch.stack(list(looks))),
               count=count * len(looks))  # fmt: skip
    alive = torch.stack(list(looks[-2:])).any(0)
    report.add(item, f"without collapse, {_seconds(last)}", share(alive), count=count,
               at_least=1.0)  # fmt: skip


def outside_pictures(settings: Settings, device: torch.device) -> tuple[Tensor, list[str]]:
    """Pictures from outside the world [B, 3, 160, 256], and where each comes from.

    Photographs that scikit-image carries, as far as it is installed; painted ones for the rest.
    """
    names, photographs = _photographs()
    missing = OUTSIDE_COUNT - len(names)
    painted = synthetic_photos(missing, HELD_OUT_SEED + 10 + settings.seed, device=device)
    pictures = [*(photo.to(device) for photo in photographs), *painted.float()]
    return torch.stack(pictures), [*names, *(f"painted {i}" for i in range(missing))]


def _photographs() -> tuple[list[str], list[Tensor]]:
    """Bundled photographs, cropped to 8:5 in the middle and resized."""
    try:
        import skimage
    except ImportError:
        return [], []
    from pathlib import Path

    import numpy as np
    from PIL import Image, ImageOps

    folder = Path(skimage.__file__).parent / "data"
    names, pictures = [], []
    for name in _OUTSIDE_NAMES:
        for path in sorted(folder.glob(f"{name}.*")):
            with Image.open(path) as image:
                fitted = ImageOps.fit(image.convert("RGB"), (256, 160), Image.Resampling.LANCZOS)
            names.append(name)
            pictures.append(torch.from_numpy(np.array(fitted)).permute(2, 0, 1).float() / 255.0)
    return names, pictures


def _outside_walk(models: Models, pictures_BCHW: Tensor, chunks: int, seed: int) -> Walk:
    """Look to the right and to the left for three chunks, then go on by mixed scripts, no prompt.

    A turn keeps the horizon where it is and shows what the picture does not.
    """
    count, frames = len(pictures_BCHW), chunks * BLOCK_FRAMES
    generator = torch.Generator().manual_seed(HELD_OUT_SEED + seed)
    keys = walks.key_scripts(count, frames, generator)
    keys[:, : 3 * BLOCK_FRAMES] = 0.0
    keys[:, :BLOCK_FRAMES, YAW] = 1.0
    keys[:, BLOCK_FRAMES : 3 * BLOCK_FRAMES, YAW] = -1.0
    speeds = walks.smoothed_speeds(keys)
    heading = speeds[..., 2].cumsum(1) - speeds[..., 2]
    pitch = (speeds[..., 3].cumsum(1) - speeds[..., 3]).clamp(
        -walks.PITCH_LIMIT_RAD, walks.PITCH_LIMIT_RAD
    )
    ahead = heading + speeds[..., 2]
    sine, cosine = ahead.sin(), ahead.cos()
    steps = torch.stack(
        [
            sine * speeds[..., 0] + cosine * speeds[..., 1],
            cosine * speeds[..., 0] - sine * speeds[..., 1],
        ],
        -1,
    )
    c2w = walks.camera_matrix(steps.cumsum(1) - steps, heading, pitch)
    index = camera_indices(chunks * BLOCK_LATENTS)
    return Walk(
        anchor_BCTHW=encode_pictures(models, pictures_BCHW),
        views_BT44=relative_views(c2w[:, index], c2w[:, 0]).to(models.device),
        prompts=[""] * count,
        later_prompts=[""] * count,
        switch_chunk=chunks,
    )


def measure_outside(models: Models, settings: Settings, report: Report) -> None:
    """Start from pictures that are not of this world."""
    pictures, names = outside_pictures(settings, models.device)
    report.environment["outside_pictures"] = names
    last, count, sheet = settings.outside_chunks[-1], len(names), Sheet(scale=1.0)
    sheet.column(pictures)
    walk = _outside_walk(models, pictures, last, 10 + settings.seed)
    round_trip = FrameStream(models).decode(
        encode_chunk(models, pictures[:, None].expand(-1, BLOCK_FRAMES, -1, -1, -1))
    )
    report.add("outside", "PSNR of the pictures through the autoencoder",
               metrics.psnr_db(round_trip, pictures[:, None].expand_as(round_trip)).mean(),
               unit="dB", count=count)  # fmt: skip
    looks = []
    brightness, contrast = metrics.brightness(pictures), metrics.contrast(pictures[:, None])
    for chunk, _, frames in _frames_at(models, walk, 10 + settings.seed, settings.outside_chunks):
        made = frames[:, settings.frames]
        if chunk <= 3:
            palette = metrics.palette_distance(made, pictures)
            shift = metrics.horizon_shift_px(made[:, -1:], pictures).abs()
            report.add("outside", f"palette distance, median, chunk {chunk}", median(palette),
                       count=count, at_most=0.1)  # fmt: skip
            report.add("outside", f"palette distance, worst, chunk {chunk}", palette.max(),
                       count=count)  # fmt: skip
            report.add("outside", f"shift of the horizon, median, chunk {chunk}", median(shift),
                       unit="px", count=count, at_most=8.0)  # fmt: skip
        ratio = metrics.contrast(made) / contrast
        looks.append(_is_alive((metrics.brightness(made) - brightness).abs(), ratio))
        report.add("outside", f"contrast / picture, least, {_seconds(chunk)}", ratio.min(),
                   count=count)  # fmt: skip
        sheet.column(frames[:, -1])
    _report_collapse(report, "outside", looks, last)
    settings.save(sheet, "outside")
