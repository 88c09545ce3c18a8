"""Items of the quality table that follow the truth: autoencoder, rollout, motion, memory, prompts.

Owns one function an item; each takes the models, the settings and the report, and adds its figures.
Chunks are counted from 1 in names and from 0 in code. Invariant: only figures of the table's
contract carry targets.

Shape suffixes: B clips, F frames, C channels or colours, H height, W width.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.camera import FIRST_FRAMES
from miniworld.evaluation import motion
from miniworld.evaluation.cases import (
    ALL_FRAMES,
    FORWARD,
    RIGHT,
    YAW,
    held_keys,
    mixed_cases,
    scripted_cases,
)
from miniworld.evaluation.figures import Report, Sheet, median, share
from miniworld.evaluation.metrics import (
    edge_correlation,
    edge_ratio,
    grid,
    psnr_db,
    sharpness_ratio,
)
from miniworld.evaluation.models import FrameStream, Models, Sessions, encode_chunk, roll_out
from vae_stream.geometry import BLOCK_FRAMES

YAW_PAIR = (6, 14)
"""Frames of a chunk between which motion is measured: 8 frames, 9.6 degrees of turning."""
_PAIR_FRAMES = YAW_PAIR[1] - YAW_PAIR[0]
_SHEET_ROWS = 6
_TURN_FRAMES = 34
_SWITCH_CHUNK = 4
_LEADING_CHUNK = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Size of an evaluation."""

    cases: int = 64
    seed: int = 0
    report_chunks: tuple[int, ...] = (1, 3, 6, 12)
    """Counted from 1."""
    long_chunks: tuple[int, ...] = (1, 5, 10, 20, 40, 60, 85)
    """Looked at in rollouts of 60 s."""
    endless_chunks: tuple[int, ...] = (1, 100, 250, 400, 550, 700, 850)
    """Looked at in rollouts of ten minutes."""
    outside_chunks: tuple[int, ...] = (1, 2, 3, 10, 20, 28)
    frames: tuple[int, ...] = ALL_FRAMES
    """Frames of a chunk that are compared with the truth."""
    sheet_dir: Path | None = None

    def save(self, sheet: Sheet, name: str) -> None:
        """Write a contact sheet where one is wanted."""
        if self.sheet_dir is not None:
            sheet.save(self.sheet_dir / f"{name}.png")


SHORT = Settings(
    cases=8,
    report_chunks=(1, 3),
    long_chunks=(1, 4, 8),
    endless_chunks=(1, 6, 12),
    outside_chunks=(1, 2, 3, 4),
    frames=(0, 4, 8, 12, 16),
)
"""A form that two CPU cores finish in minutes."""


def measure_vae(models: Models, settings: Settings, report: Report) -> None:
    """Truth through encoder and decoder."""
    last = settings.report_chunks[-1]
    cases = mixed_cases(models, settings.cases, last, 1 + settings.seed)
    grids = []
    for chunk in settings.report_chunks:
        made, truth = cases.round_trip(chunk - 1)
        error = psnr_db(made, truth)
        report.add("vae", f"PSNR, chunk {chunk}", error.mean(), unit="dB", count=len(error),
                   at_least=38.0)  # fmt: skip
        report.add("vae", f"PSNR of the worst clip, chunk {chunk}", error.min(), unit="dB",
                   count=len(error))  # fmt: skip
        report.add("vae", f"sharpness / truth, chunk {chunk}", sharpness_ratio(made, truth),
                   count=len(error), at_least=0.9, at_most=1.05)  # fmt: skip
        report.add("vae", f"strength of edges / truth, chunk {chunk}", edge_ratio(made, truth),
                   count=len(error))  # fmt: skip
        grids.append(grid(made, truth))
    levels, ratio = (max(values) for values in zip(*grids, strict=True))
    report.add("vae", "grid of 2 or 4 px, amplitude, worst chunk", levels, unit="/255",
               count=settings.cases, at_most=0.5)  # fmt: skip
    report.add("vae", "grid of 2 or 4 px, peak / truth, worst chunk", ratio, count=settings.cases)


def measure_rollout(models: Models, settings: Settings, report: Report) -> None:
    """Mixed scripts from the start of a session."""
    last = settings.report_chunks[-1]
    cases = mixed_cases(models, settings.cases, last, 1 + settings.seed)
    frozen = cases.first_pictures()[:, None]
    gains = {3: 5.0, 6: 5.0, 12: 4.0}
    stream, sheet, made_s = FrameStream(models), Sheet(), 0.0
    started_s = time.perf_counter()
    for chunk, latents in enumerate(roll_out(models, cases.walk(), 1 + settings.seed), start=1):
        _wait(models)
        made_s += time.perf_counter() - started_s
        frames = stream.decode(latents)
        if chunk in settings.report_chunks:
            truth = cases.truth(chunk - 1, settings.frames)
            made = frames[:, settings.frames]
            error, still = psnr_db(made, truth), psnr_db(frozen.expand_as(truth), truth)
            count = len(error)
            report.add("rollout", f"PSNR, chunk {chunk}", error.mean(), unit="dB", count=count)
            report.add("rollout", f"PSNR of the frozen first frame, chunk {chunk}", still.mean(),
                       unit="dB", count=count)  # fmt: skip
            report.add("rollout", f"gain over the frozen frame, chunk {chunk}",
                       (error - still).mean(), unit="dB", count=count,
                       at_least=gains.get(chunk))  # fmt: skip
            report.add("rollout", f"sharpness / truth, chunk {chunk}", sharpness_ratio(made, truth),
                       count=count)  # fmt: skip
            for frame in (0, 16):
                sheet.column(
                    cases.truth(chunk - 1, (frame,))[:_SHEET_ROWS, 0], frames[:_SHEET_ROWS, frame]
                )
        started_s = time.perf_counter()
    reference, _ = cases.round_trip(last - 1)
    report.add("rollout", f"sharpness / VAE round trip, chunk {last}",
               sharpness_ratio(frames, reference), count=len(cases),
               at_least=0.9, at_most=1.1)  # fmt: skip
    report.add("rollout", f"strength of edges / VAE round trip, chunk {last}",
               edge_ratio(frames, reference), count=len(cases))  # fmt: skip
    report.add("rollout", "latent chunks made, all clips", len(cases) * last / made_s,
               unit="chunks/s", count=len(cases))  # fmt: skip
    settings.save(sheet, "rollout")


def _wait(models: Models) -> None:
    if models.device.type == "cuda":
        torch.cuda.synchronize()


def measure_yaw(models: Models, settings: Settings, report: Report) -> None:
    """Turn on the spot for ever, left and right, and see how far the picture turned."""
    last = settings.report_chunks[-1]
    keys = held_keys(settings.cases, last, YAW, (1, -1))
    cases = scripted_cases(models, keys, 2 + settings.seed)
    stream, sheet = FrameStream(models), Sheet()
    walk = cases.walk()
    for chunk, latents in enumerate(roll_out(models, walk, 2 + settings.seed), start=1):
        frames = stream.decode(latents)
        if chunk not in settings.report_chunks:
            continue
        first, second = (cases.poses(chunk - 1, frame) for frame in YAW_PAIR)
        command = motion.heading_deg(second) - motion.heading_deg(first)
        command = ((command + 180.0) % 360.0 - 180.0).to(frames)
        seen = motion.yaw_deg(frames[:, YAW_PAIR[0]], frames[:, YAW_PAIR[1]])
        truth = cases.truth(chunk - 1, YAW_PAIR)
        known = motion.yaw_deg(truth[:, 0], truth[:, 1])
        error, count = (seen - command).abs(), len(command)
        report.add("yaw", f"median error, chunk {chunk}", median(error), unit="deg", count=count,
                   at_most=0.6)  # fmt: skip
        report.add("yaw", f"within 2 degrees, chunk {chunk}", share(error <= 2.0), count=count,
                   at_least=0.97)  # fmt: skip
        report.add("yaw", f"right sign, chunk {chunk}", share(seen.sign() == command.sign()),
                   count=count, at_least=1.0)  # fmt: skip
        report.add("yaw", f"median error of the measure itself, chunk {chunk}",
                   median((known - command).abs()), unit="deg", count=count)  # fmt: skip
        sheet.column(truth[:_SHEET_ROWS, 0], frames[:_SHEET_ROWS, YAW_PAIR[0]])
        sheet.column(truth[:_SHEET_ROWS, 1], frames[:_SHEET_ROWS, YAW_PAIR[1]])
    settings.save(sheet, "yaw")


def measure_walking(models: Models, settings: Settings, report: Report) -> None:
    """Walk ahead and back, step left and right, and see how far the ground moved."""
    last = settings.report_chunks[-1]
    half = settings.cases // 2
    keys = torch.cat(
        [
            held_keys(settings.cases - half, last, FORWARD, (1, -1)),
            held_keys(half, last, RIGHT, (1, -1)),
        ]
    )
    cases = scripted_cases(models, keys, 3 + settings.seed)
    ahead = torch.arange(len(cases)) < len(cases) - half
    stream = FrameStream(models)
    walk = cases.walk()
    for chunk, latents in enumerate(roll_out(models, walk, 3 + settings.seed), start=1):
        frames = stream.decode(latents)
        if chunk not in settings.report_chunks:
            continue
        truth = cases.truth(chunk - 1, YAW_PAIR)
        poses = [cases.poses(chunk - 1, frame) for frame in YAW_PAIR]
        forward, right = (step.float() for step in motion.step_between(*poses))
        for name, is_mine, along, across, per_frame, estimate in (
            ("walking", ahead, forward, right, 0.07, motion.forward_units),
            ("strafing", ~ahead, right, forward, 0.05, motion.strafe_units),
        ):
            command = per_frame * _PAIR_FRAMES
            # Whoever slides along a wall does not walk as commanded.
            is_free = ((along.abs() - command).abs() < 0.05 * command) & (across.abs() < 0.02)
            index = (is_mine & is_free).nonzero()[:, 0]
            if not len(index):
                continue
            pair = frames[index.to(frames.device)][:, YAW_PAIR]
            known = truth[index.to(frames.device)]
            true = along[index]
            seen = estimate(pair[:, 0], pair[:, 1], command).cpu() / true
            exact = estimate(known[:, 0], known[:, 1], command).cpu() / true
            count = len(index)
            report.add(name, f"seen / commanded, median, chunk {chunk}", median(seen), count=count,
                       at_least=0.9, at_most=1.1)  # fmt: skip
            report.add(name, f"median relative error, chunk {chunk}",
                       median((seen - 1).abs()), count=count)  # fmt: skip
            report.add(name, f"right sign, chunk {chunk}", share(seen > 0), count=count,
                       at_least=1.0)  # fmt: skip
            report.add(name, f"seen / commanded on the truth, median, chunk {chunk}",
                       median(exact), count=count)  # fmt: skip
            report.add(name, f"right sign on the truth, chunk {chunk}", share(exact > 0),
                       count=count)  # fmt: skip


def measure_return(models: Models, settings: Settings, report: Report) -> None:
    """Turn 41 degrees to the right and back: does the same world come back?"""
    chunks = 6
    keys = torch.zeros(settings.cases, chunks * BLOCK_FRAMES, 4)
    keys[:, :_TURN_FRAMES, YAW] = 1.0
    keys[:, _TURN_FRAMES : 2 * _TURN_FRAMES, YAW] = -1.0
    cases = scripted_cases(models, keys, 4 + settings.seed)
    stream, sheet = FrameStream(models), Sheet()
    walk = cases.walk()
    for chunk, latents in enumerate(roll_out(models, walk, 4 + settings.seed), start=1):
        frames = stream.decode(latents)
        truth = cases.truth(chunk - 1, settings.frames)
        error = psnr_db(frames[:, settings.frames], truth)
        report.add("return", f"PSNR, chunk {chunk}", error.mean(), unit="dB", count=len(error),
                   at_least=28.5 if chunk == 5 else None)  # fmt: skip
        sheet.column(truth[:_SHEET_ROWS, -1], frames[:_SHEET_ROWS, settings.frames[-1]])
    settings.save(sheet, "return")


def measure_prompts(models: Models, settings: Settings, report: Report) -> None:
    """Another prompt in the middle of a walk, and one that differs from the first picture."""
    chunks = _SWITCH_CHUNK + 4
    cases = mixed_cases(
        models, settings.cases, chunks, 5 + settings.seed, switch_chunk=_SWITCH_CHUNK
    )
    stream, sheet, kept = FrameStream(models), Sheet(), {}
    walk = cases.walk()
    for chunk, latents in enumerate(roll_out(models, walk, 5 + settings.seed)):
        frames = stream.decode(latents)
        if chunk < _SWITCH_CHUNK - 1:
            continue
        made = frames[:, settings.frames]
        new = cases.truth(chunk, settings.frames)
        count = len(made)
        kept[chunk] = edge_correlation(made, new).mean()
        sheet.column(new[:_SHEET_ROWS, -1], made[:_SHEET_ROWS, -1])
        if chunk < _SWITCH_CHUNK:
            continue
        is_next = chunk == _SWITCH_CHUNK
        old = cases.truth(chunk, settings.frames, style=0)
        to_new, to_old = psnr_db(made, new), psnr_db(made, old)
        report.add("prompt", f"PSNR to the new style, chunk {chunk + 1}", to_new.mean(), unit="dB",
                   count=count, at_least=24.5 if is_next else None)  # fmt: skip
        report.add("prompt", f"margin over the old style, chunk {chunk + 1}",
                   (to_new - to_old).mean(), unit="dB", count=count,
                   at_least=12.0 if is_next else None)  # fmt: skip
    report.add("prompt", "edges kept: correlation with the truth, after / before the switch",
               kept[_SWITCH_CHUNK] / kept[_SWITCH_CHUNK - 1], count=settings.cases,
               at_least=0.8)  # fmt: skip
    settings.save(sheet, "prompt")
    cases = mixed_cases(models, settings.cases, 2, 6 + settings.seed, switch_chunk=0)
    stream = FrameStream(models)
    for chunk, latents in enumerate(roll_out(models, cases.walk(), 6 + settings.seed)):
        made = stream.decode(latents)[:, settings.frames]
        to_new = psnr_db(made, cases.truth(chunk, settings.frames))
        to_old = psnr_db(made, cases.truth(chunk, settings.frames, style=0))
        report.add("prompt", f"prompt against picture: PSNR to the prompt, chunk {chunk + 1}",
                   to_new.mean(), unit="dB", count=len(made))  # fmt: skip
        report.add("prompt", f"prompt against picture: margin, chunk {chunk + 1}",
                   (to_new - to_old).mean(), unit="dB", count=len(made))  # fmt: skip


@torch.no_grad()
def measure_leading(models: Models, settings: Settings, report: Report) -> None:
    """Make a chunk again from its middle: its first latents are given, the rest is compared.

    Once the given latents are the chunk's own (as when keys change in mid-chunk), once the truth's.
    """
    cases = mixed_cases(models, settings.cases, _LEADING_CHUNK + 1, 7 + settings.seed)
    sessions = Sessions(models, cases.walk(), 7 + settings.seed)
    stream = FrameStream(models)
    for _ in range(_LEADING_CHUNK):
        sessions.open()
        latents = sessions.denoise()
        sessions.commit(latents)
        stream.decode(latents)
    truth = cases.truth(_LEADING_CHUNK)
    sessions.open()
    whole = sessions.denoise()
    whole_frames = stream.copy().decode(whole)
    for source, given in (("own", whole), ("true", encode_chunk(models, truth))):
        differences = []
        for count in range(1, 5):
            rest = slice(FIRST_FRAMES[count], None)
            made = stream.copy().decode(sessions.denoise(given[:, :, :count]))
            difference = psnr_db(made[:, rest], truth[:, rest]) - psnr_db(
                whole_frames[:, rest], truth[:, rest]
            )
            differences.append(float(difference.mean()))
            report.add("leading", f"PSNR of the rest / whole chunk, {count} {source} latents given",
                       differences[-1], unit="dB", count=len(made))  # fmt: skip
        report.add("leading", f"worst of these, {source} latents", min(differences), unit="dB",
                   count=len(cases), at_least=-0.5)  # fmt: skip
    sessions.close()
