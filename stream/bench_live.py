"""`worldstream bench live`: the service played in a real browser, and what it costs.

Owns the scenario, the phases, the table and the record; `live_process` serves, `live_browser`
plays, `live_figures` has the arithmetic. All is started as a person would: `serve`, then the page.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.record import append_record, describe_machine
from engine.errors import ConfigError, UnsupportedError
from stream import live_figures as figures
from stream.live_browser import Visitor, chromium, find_chromium, strokes
from stream.live_process import VIEWERS_LIMIT, Load, ServiceProcess, running
from stream.processes import has_processes

if TYPE_CHECKING:
    from playwright.sync_api import Browser

TRANSPORTS = {"webrtc": "webrtc", "ws-h264": "webcodecs", "ws-jpeg": "jpeg"}
"""Name here and the page's name for it."""
SECONDS_RANGE = (5, 1_500)
WARM_UP_S = 8.0
"""Played and not counted: the service learns what a chunk costs. Less in short runs."""
VIEWERS_S = 20.0
PICTURE_LIMIT_S = 30.0
EDGE_S = 60.0
"""Begin and end of the run, compared for growing lag; less in short runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveScenario:
    """What is measured. Raises ConfigError for what cannot be."""

    preset: str = "mini"
    transport: str = "webrtc"
    seconds: int = 300
    viewers: int = 3
    """Further pages that watch, after the run of the player alone."""
    seed: int = 0
    """Of the strokes of keys."""

    def __post_init__(self) -> None:
        low, high = SECONDS_RANGE
        if not low <= self.seconds <= high:
            raise ConfigError(f"seconds: {self.seconds}; allowed: {low} to {high}")
        if not 0 <= self.viewers <= VIEWERS_LIMIT:
            raise ConfigError(f"viewers: {self.viewers}; allowed: 0 to {VIEWERS_LIMIT}")
        if self.transport not in TRANSPORTS:
            raise ConfigError(f"transport: {self.transport!r}; allowed: {', '.join(TRANSPORTS)}")

    @property
    def warm_up_s(self) -> float:
        """Played before each part."""
        return min(WARM_UP_S, self.seconds / 4)

    @property
    def watched_s(self) -> float:
        """Length of the part with viewers."""
        return min(VIEWERS_S, self.seconds / 2)

    @property
    def edge_s(self) -> float:
        """Length of the first and of the last part."""
        return min(EDGE_S, self.seconds / 4)


def bench_live(scenario: LiveScenario, *, record: Path | None) -> str:
    """Serve, play, draw the table on stderr, append the record if asked; return the JSON line.

    Raises:
        UnsupportedError: no Chromium, no playwright, or the page does not play.
        DeviceError: the service does not start.
    """
    if not has_processes():
        raise UnsupportedError("system: processes are read under /proc; needed: Linux")
    find_chromium()
    console = Console(stderr=True)
    measured = _run(scenario, console)
    line = {
        "name": "live",
        **dataclasses.asdict(scenario),
        **measured,
        **dataclasses.asdict(describe_machine(torch.device("cpu"))),
    }
    for table in _tables(line):
        console.print(table)
    if record is not None:
        append_record(record, line)
    return json.dumps(line)


def _run(scenario: LiveScenario, console: Console) -> dict[str, Any]:
    with console.status("starting the service") as status, running(scenario.preset) as service:
        ready_s = service.wait_until_ready()
        status.update("opening the page")
        with chromium() as browser:
            version = browser.version
            player = _open(browser, scenario, service.base)
            player.wait_for("body[data-state=READY]", PICTURE_LIMIT_S)
            status.update("warming up")
            keys = strokes(scenario.seed)
            _play([player], keys, scenario.warm_up_s)
            status.update(f"playing for {scenario.seconds} s")
            alone = _phase(service, [player], keys, scenario.seconds)
            crowd: _Phase | None = None
            if scenario.viewers:
                status.update(f"playing before {scenario.viewers} who watch")
                welcome = player.log.first("welcome") or {}
                url = f"{service.base}/?watch={welcome['session']}"
                watching = [_open(browser, scenario, url) for _ in range(scenario.viewers)]
                _play([player, *watching], keys, scenario.warm_up_s)
                crowd = _phase(service, [player, *watching], keys, scenario.watched_s)
            rung = player.page.get_attribute("body", "data-rung")
            codec = (player.log.first("rtc.answer") or {}).get("codec")
    if rung != TRANSPORTS[scenario.transport]:
        raise UnsupportedError(
            f"transport: the page fell to {rung!r}; expected {TRANSPORTS[scenario.transport]!r}"
        )
    measured = _figures(scenario, player, alone)
    measured["server_ready_s"] = round(ready_s, 2)
    measured["chromium"] = version
    measured["codec"] = codec
    if crowd is not None:
        measured["watched"] = _watched(scenario, alone, crowd)
    return measured


def _open(browser: Browser, scenario: LiveScenario, url: str) -> Visitor:
    mark = "&" if "?" in url else "?"
    visitor = Visitor(browser, f"{url}{mark}transport={TRANSPORTS[scenario.transport]}")
    visitor.wait_for("#overlay[data-picture=yes]", PICTURE_LIMIT_S)
    return visitor


def _play(visitors: Sequence[Visitor], keys: Iterator[Any], seconds: float) -> None:
    """Let the first visitor hold keys for a while; logs are read between two strokes."""
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        visitors[0].hold(next(keys))
        for visitor in visitors:
            visitor.read_log()


# ---- a phase


@dataclass(frozen=True, kw_only=True, slots=True)
class _Phase:
    """Outcome of playing for a while."""

    begin_ms: float
    """By the wall clock, which pages share."""
    end_ms: float
    begin: Load
    end: Load
    counted: Mapping[str, float]
    """Growth of every metric."""
    viewers: Sequence[Visitor]

    @property
    def seconds(self) -> float:
        """How long it was."""
        return (self.end_ms - self.begin_ms) / 1e3

    def mean_ms(self, histogram: str) -> float:
        """Mean of what a histogram of seconds took in."""
        count = self.counted.get(f"worldstream_{histogram}_count", 0.0)
        return 1e3 * self.counted.get(f"worldstream_{histogram}_sum", 0.0) / max(1.0, count)

    def cores(self) -> dict[str, float]:
        """Processor time by wall time: 1 is a core. `rest` is everything else on the machine."""
        took_s = {
            side: getattr(self.end, side).cpu_s - getattr(self.begin, side).cpu_s
            for side in ("server", "worker", "browser")
        }
        took_s["rest"] = self.end.machine_cpu_s - self.begin.machine_cpu_s - sum(took_s.values())
        return {side: round(cpu_s / self.seconds, 3) for side, cpu_s in took_s.items()}


def _phase(
    service: ServiceProcess, visitors: Sequence[Visitor], keys: Iterator[Any], seconds: float
) -> _Phase:
    before, load, begin_ms = service.metrics(), Load.now(service), time.time() * 1e3
    _play(visitors, keys, seconds)
    end_ms, end_load, after = time.time() * 1e3, Load.now(service), service.metrics()
    # Reports of shown frames come once a second.
    _play(visitors, keys, 1.5)
    return _Phase(
        begin_ms=begin_ms,
        end_ms=end_ms,
        begin=load,
        end=end_load,
        counted={name: value - before.get(name, 0.0) for name, value in after.items()},
        viewers=visitors,
    )


# ---- figures


def _figures(scenario: LiveScenario, player: Visitor, phase: _Phase) -> dict[str, Any]:
    """Figures of the player alone."""
    log = player.log
    every = figures.shown_frames(log)
    shown = [each for each in every if phase.begin_ms <= each.at_ms < phase.end_ms]
    rates = figures.frame_rates(shown, phase.begin_ms, phase.end_ms)
    timed = figures.keys_to_screen(
        log,
        every,
        encode_ms=phase.mean_ms("encode_seconds"),
        decode_latent_ms=phase.mean_ms("first_decode_seconds"),
    )
    keys = [each for each in timed if phase.begin_ms <= each.event_ms < phase.end_ms]
    edge_ms = scenario.edge_s * 1e3
    first = [each.total_ms for each in keys if each.event_ms < phase.begin_ms + edge_ms]
    last = [each.total_ms for each in keys if each.event_ms > phase.end_ms - edge_ms]
    gaps_ms = [b.at_ms - a.at_ms for a, b in itertools.pairwise(shown)]
    sent_count = shown[-1].frame - shown[0].frame + 1 if shown else 0
    opened_ms = log.opened_ms
    picture_ms = figures.first_shown_ms(log)
    offered_ms = min(at_ms for at_ms, each in log.sent if each["t"] in ("rtc.offer", "media"))
    return {
        "frames_per_second": round(len(shown) / phase.seconds, 2),
        "fps_window_min": min(rates, default=None),
        "fps_window_p50": figures.percentiles(rates)["p50"] if rates else None,
        "key_to_screen_ms": figures.percentiles([each.total_ms for each in keys]),
        "parts_ms": {
            name: figures.percentiles([each.parts[name] for each in keys]) for name in figures.PARTS
        },
        "key_to_screen_first_ms": figures.percentiles(first),
        "key_to_screen_last_ms": figures.percentiles(last),
        "edge_s": scenario.edge_s,
        "media_lag_growth_ms": round(figures.media_lag_growth_ms(shown), 1),
        "frame_gap_ms": figures.percentiles(gaps_ms),
        "frame_gap_max_ms": round(max(gaps_ms, default=0.0), 1),
        "shown_share": round(len(shown) / max(1, sent_count), 4),
        "dropped_count": int(phase.counted.get("worldstream_frames_dropped_total", 0.0)),
        "page_to_first_frame_s": _seconds(opened_ms, picture_ms),
        "connect_s": _seconds(offered_ms, picture_ms),
        "chunk_ms": round(phase.mean_ms("chunk_seconds"), 1),
        "denoise_ms": round(phase.mean_ms("denoise_seconds"), 1),
        "refresh_ms": round(phase.mean_ms("refresh_seconds"), 1),
        "decode_ms": round(phase.mean_ms("decode_seconds"), 1),
        "encode_ms": round(phase.mean_ms("encode_seconds"), 2),
        "cores": phase.cores(),
        "memory": {
            side: {
                "peak_mib": round(getattr(phase.end, side).peak_mib, 1),
                "growth_mib": round(
                    getattr(phase.end, side).resident_mib - getattr(phase.begin, side).resident_mib,
                    1,
                ),
            }
            for side in ("server", "worker")
        },
    }


def _watched(scenario: LiveScenario, alone: _Phase, crowd: _Phase) -> dict[str, Any]:
    """What further viewers cost."""
    rates = []
    for visitor in crowd.viewers:
        shown = figures.shown_frames(visitor.log)
        within = [each for each in shown if crowd.begin_ms <= each.at_ms < crowd.end_ms]
        rates.append(round(len(within) / crowd.seconds, 2))
    more = crowd.cores()["server"] - alone.cores()["server"]
    return {
        "viewers": scenario.viewers,
        "frames_per_second": rates,
        "cores": crowd.cores(),
        "server_cores_per_viewer": round(more / scenario.viewers, 4),
        "encode_ms": round(crowd.mean_ms("encode_seconds"), 2),
    }


def _seconds(begin_ms: float, end_ms: float | None) -> float | None:
    return None if end_ms is None else round((end_ms - begin_ms) / 1e3, 3)


# ---- tables


def _tables(line: Mapping[str, Any]) -> Iterator[Table]:
    times = Table(title=f"From a key to the screen, ms: {line['preset']} by {line['transport']}")
    for title in ("part", "n", "p20", "p50", "p80", "p95"):
        times.add_column(title, justify="left" if title == "part" else "right")
    rows = {**line["parts_ms"], "key to screen": line["key_to_screen_ms"]}
    rows["the same, first part"] = line["key_to_screen_first_ms"]
    rows["the same, last part"] = line["key_to_screen_last_ms"]
    for name, part in rows.items():
        marks = (f"{part[mark]:.1f}" for mark in ("p20", "p50", "p80", "p95"))
        times.add_row(name.replace("_", " "), str(part["n"]), *marks, end_section=name == "display")
    yield times
    table = Table(title="Service and page")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name in (
        "frames_per_second", "fps_window_min", "fps_window_p50", "media_lag_growth_ms",
        "frame_gap_max_ms", "shown_share", "dropped_count", "server_ready_s",
        "page_to_first_frame_s", "connect_s", "chunk_ms", "denoise_ms", "refresh_ms", "decode_ms",
        "encode_ms",
    ):  # fmt: skip
        table.add_row(name.replace("_", " "), str(line[name]))
    for side, cores in line["cores"].items():
        table.add_row(f"cores, {side}", str(cores))
    for side, memory in line["memory"].items():
        text = f"{memory['peak_mib']} peak, {memory['growth_mib']:+} in the run"
        table.add_row(f"MiB, {side}", text)
    for name, value in line.get("watched", {}).items():
        table.add_row(f"watched, {name.replace('_', ' ')}", str(value))
    yield table
