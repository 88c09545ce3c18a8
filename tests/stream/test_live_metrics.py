"""What the service tells of itself: everything that the protocol names, scraped of a live run."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.stream.live_service import Client, Service, running

pytestmark = [
    pytest.mark.cpu,
    # Sockets of the threads that a failed test leaves behind.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

Labels = frozenset[tuple[str, str]]

COUNTED: dict[str, dict[str, str]] = {
    # counters
    "sessions_ended_total": {"reason": "GONE"},
    "messages_in_total": {"type": "act"},
    "messages_out_total": {"type": "chunk"},
    "messages_bad_total": {"why": "BAD_MESSAGE"},
    "keyframes_total": {"cause": "join"},
    "frames_made_total": {},
    "frames_encoded_total": {"codec": "h264"},
    "frames_sent_total": {"transport": "ws"},
    "frames_shown_total": {},
    "transports_chosen_total": {"transport": "ws-h264"},
    "reconnects_total": {},
    "epoch_changes_total": {},
    "errors_total": {"code": "BAD_MESSAGE"},
    # histograms
    "queue_wait_seconds_count": {},
    "warm_up_seconds_count": {},
    "chunk_seconds_count": {},
    "first_frame_seconds_count": {},
    "latch_age_seconds_count": {},
    "ring_wait_seconds_count": {},
    "encode_seconds_count": {"codec": "h264", "size": "256x160"},
    "action_to_photon_seconds_count": {"transport": "ws-h264"},
    "action_to_present_seconds_count": {},
    "frame_to_photon_seconds_count": {"transport": "ws-h264"},
    "loop_lag_seconds_count": {},
    # what workers count
    "graph_passes_total": {"worker": "0", "part": "transformer", "outcome": "replayed"},
    # gauges
    "sessions": {"state": "CLOSED"},
    "resident_bytes": {"process": "service"},
    "graph_recordings": {"worker": "0", "part": "transformer"},
    "graph_bytes": {"worker": "0", "part": "transformer"},
    "worker_info": {
        "worker": "0",
        "device": "cpu",
        "ranks": "1",
        "dtype": "float32",
        "linear": "",  # of the renderer
        "attention": "video painted",
    },
}
"""Names, and labels of a sample that is above 0 after the run of this test."""
WHILE_PLAYING = {
    "sessions": {"state": "RUNNING"},
    "viewers": {},
    "bitrate_bps": {},
    "resident_bytes": {"process": "workers"},
}
ZERO_HERE = ("queue_length", "playout_left_seconds", "rtt_seconds", "remb_bps", "device_bytes",
             "frames_dropped_total", "drops_total", "worker_restarts_total", "uploads_total",
             "send_seconds_count", "ring_frames", "graph_evictions_total")  # fmt: skip
"""Those that are there and have no value that this run would fix."""


class Scrape:
    """All samples of the service, by name and labels."""

    def __init__(self, service: Service) -> None:
        text = service.request("GET", "/metrics")[1].decode()
        self.values: dict[str, dict[Labels, float]] = {}
        self.families: set[str] = set()
        for family in text_string_to_metric_families(text):
            self.families.add(family.name)
            for sample in family.samples:
                of_name = self.values.setdefault(sample.name, {})
                of_name[frozenset(sample.labels.items())] = sample.value

    def has(self, name: str, labels: dict[str, str]) -> bool:
        samples = self.values.get(f"worldstream_{name}", {})
        return samples.get(frozenset(labels.items()), 0.0) > 0

    def value(self, name: str, labels: dict[str, str]) -> float:
        return self.values[f"worldstream_{name}"][frozenset(labels.items())]


@pytest.fixture(scope="module")
def scrapes() -> Iterator[tuple[Scrape, Scrape]]:
    """While a client plays, and after it has left."""
    with running(grace_s=5.0) as service:
        client = Client.hello(service)
        client.until("state", state="READY")
        client.send(t="ping", id=1, ct=time.time() * 1e3)
        client.until("pong")
        client.send(t="media", transport="ws", codec="h264")
        client.act("KeyW", edges=[[1, "KeyW", 1, time.time() * 1e3]])
        client.until("chunk")
        client.until_frames(20)
        client.send(t="act")
        client.until("err", code="BAD_MESSAGE")
        newest = [[frame, time.time() * 1e3] for frame, _, _ in client.frames[-15:]]
        client.send(t="shown", frames=newest)
        client.send(t="reset", id=7)
        client.until("applied", id=7)
        client.act("KeyW")
        client.until_frames(3)
        replayed = COUNTED["graph_passes_total"]
        service.wait(lambda: Scrape(service).has("graph_passes_total", replayed), "replays")
        playing = Scrape(service)
        client.close()
        service.wait(lambda: service.state(client.made["session_id"]) == "GRACE", "grace")
        welcome_token = next(each for each in client.messages if each["t"] == "welcome")
        token = welcome_token["resume_token"]
        again = Client.hello(service, service.create(resume=token))
        again.send(t="bye")
        headers = {"Authorization": f"Bearer {again.messages[0]['resume_token']}"}
        service.request("DELETE", f"/v1/sessions/{client.made['session_id']}", **headers)
        again.close()
        yield playing, Scrape(service)


@pytest.mark.parametrize("name", COUNTED)
def test_what_happened_is_counted(scrapes: tuple[Scrape, Scrape], name: str) -> None:
    assert scrapes[1].value(name, COUNTED[name]) > 0


@pytest.mark.parametrize("name", WHILE_PLAYING)
def test_what_is_the_case_is_told(scrapes: tuple[Scrape, Scrape], name: str) -> None:
    assert scrapes[0].value(name, WHILE_PLAYING[name]) > 0


@pytest.mark.parametrize("name", ZERO_HERE)
def test_what_did_not_happen_is_there(scrapes: tuple[Scrape, Scrape], name: str) -> None:
    family = f"worldstream_{name.removesuffix('_total').removesuffix('_count')}"
    assert family in scrapes[1].families


def test_a_session_that_ended_has_no_figures_of_now(scrapes: tuple[Scrape, Scrape]) -> None:
    assert scrapes[1].value("bitrate_bps", {}) == 0


def test_labels_tell_nobody_apart(scrapes: tuple[Scrape, Scrape]) -> None:
    allowed = {"transport", "codec", "size", "state", "reason", "type", "why", "cause", "code",
               "where", "result", "process", "le", "worker", "part", "outcome", "device", "dtype",
               "linear", "attention", "ranks"}  # fmt: skip
    named = {
        name for of_name in scrapes[1].values.values() for labels in of_name for name, _ in labels
    }
    assert named <= allowed


def test_times_of_a_frame_are_below_those_of_a_key(scrapes: tuple[Scrape, Scrape]) -> None:
    def mean_s(name: str) -> float:
        labels = {"transport": "ws-h264"}
        count = scrapes[1].value(f"{name}_seconds_count", labels)
        return scrapes[1].value(f"{name}_seconds_sum", labels) / count

    assert 0 <= mean_s("frame_to_photon") < mean_s("action_to_photon") < 60
