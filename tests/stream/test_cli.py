import json
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from stream.cli import main
from stream.replay import plan_replay
from stream.trace import read_trace

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).resolve().parents[2]
TINY = ["--preset", "tiny", "--weights", "random", "--device", "cpu", "--dtype", "float32"]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pixels = np.random.default_rng(0).integers(0, 255, (64, 96, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "seed.png")


def _generate(*options: str, actions: str = "w*17 left*17") -> list[str]:
    return ["generate", "--image", "seed.png", "--actions", actions, *TINY, *options]


def _frame_count(path: str) -> int:
    with av.open(path) as container:
        return sum(1 for _ in container.decode(video=0))


def _digest(text: str) -> str:
    return text.split("sha256 ")[1].split()[0]


def test_generate_makes_video_trace_and_pictures(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(_generate("--out", "a.mp4", "--png", "frames", "--gif", "a.gif", "--seed", "9"))
    out = capsys.readouterr().out
    assert code == 0
    assert _frame_count("a.mp4") == 34
    assert len(list(Path("frames").iterdir())) == 34
    assert Path("a.gif").is_file()
    trace = read_trace("a.trace.jsonl")
    assert trace.end is not None
    assert trace.end.digest == _digest(out)
    assert (trace.header.seed, trace.header.image, trace.header.prompt) == (9, "seed.png", "")
    assert [path.name for path in Path().glob(".*")] == []


def test_replay_proves_the_latents(capsys: pytest.CaptureFixture[str]) -> None:
    main(_generate("--out", "a.mp4", "--prompt", "a lake", "--png", "frames"))
    recorded = _digest(capsys.readouterr().out)
    assert main(["replay", "a.trace.jsonl", "--out", "b.mp4", "--png", "again"]) == 0
    out = capsys.readouterr().out
    assert _digest(out) == recorded
    assert "same as recorded: 2 of 2 chunks" in out
    assert _frame_count("b.mp4") == 34
    pictures = [
        [path.read_bytes() for path in sorted(Path(folder).iterdir())]
        for folder in ("frames", "again")
    ]
    assert pictures[0] == pictures[1]


def test_replay_of_a_prompt_switch_and_a_torn_end(capsys: pytest.CaptureFixture[str]) -> None:
    states = [{"frame": 0, "keys": ["w"]}, {"frame": 17, "prompt": "snow"}]
    Path("keys.jsonl").write_text("\n".join(map(json.dumps, states)))
    main(_generate("--out", "a.mp4", "--chunks", "2", actions="keys.jsonl"))
    trace = Path("a.trace.jsonl")
    trace.write_bytes(trace.read_bytes()[:-30])
    assert main(["replay", "a.trace.jsonl"]) == 0
    done = capsys.readouterr()
    assert "broke off" in done.err
    assert "same as recorded: 2 of 2 chunks" in done.out


def _edit_trace(line: int, key: str, value: object) -> None:
    path = Path("a.trace.jsonl")
    lines = path.read_text().splitlines()
    lines[line] = json.dumps({**json.loads(lines[line]), key: value})
    path.write_text("\n".join(lines) + "\n")


def test_replay_finds_the_first_chunk_that_differs(capsys: pytest.CaptureFixture[str]) -> None:
    main(_generate("--out", "a.mp4"))
    _edit_trace(2, "held", [[0, {"yaw": 1.0}]])
    assert main(["replay", "a.trace.jsonl"]) == 1
    assert "differ from chunk 1 on" in capsys.readouterr().err


def test_replay_refuses_another_model_unless_forced(capsys: pytest.CaptureFixture[str]) -> None:
    main(_generate("--out", "a.mp4"))
    _edit_trace(0, "model_hash", "0" * 64)
    assert main(["replay", "a.trace.jsonl"]) == 2
    assert "0000000000000000" in capsys.readouterr().err
    assert main(["replay", "a.trace.jsonl", "--force"]) == 0


def test_replay_refuses_another_picture(capsys: pytest.CaptureFixture[str]) -> None:
    main(_generate("--out", "a.mp4"))
    Image.new("RGB", (96, 64)).save("seed.png")
    assert main(["replay", "a.trace.jsonl"]) == 2
    assert "sha256" in capsys.readouterr().err


def test_replay_takes_the_picture_from_where_it_is_now() -> None:
    main(_generate("--out", "a.mp4"))
    Path("seed.png").rename("moved.png")
    assert main(["replay", "a.trace.jsonl", "--image", "moved.png"]) == 0


def test_replay_takes_any_gpu_for_one_of_several() -> None:
    main(_generate("--out", "a.mp4"))
    trace = read_trace("a.trace.jsonl")
    trace = replace(trace, header=replace(trace.header, device="cuda:5"))
    plan = plan_replay(trace, Path(), image=None, outputs=None, force=False)
    assert plan.world.engine.device == "cuda"


def test_renderer_and_its_replay(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--scene", "mars-rocks", "--actions", "w*17", "--out", "a.mp4", "--renderer"]
    assert main(["generate", *options]) == 0
    out = capsys.readouterr().out
    assert "frames sha256" in out
    assert _frame_count("a.mp4") == 17
    assert main(["replay", "a.trace.jsonl"]) == 0


def test_batch_continues_after_a_bad_job(capsys: pytest.CaptureFixture[str]) -> None:
    jobs = [
        {"out": "a.mp4", "actions": "w*17"},
        {"out": "b.mp4", "actions": "hop*17"},
        {"out": "c.mp4", "actions": "w*17", "image": "gone.png"},
        {"out": "d.mp4", "actions": "d*17", "seed": 1},
    ]
    Path("jobs.jsonl").write_text("\n".join(map(json.dumps, jobs)))
    code = main(["generate", "--batch", "jobs.jsonl", "--image", "seed.png", *TINY])
    done = capsys.readouterr()
    assert code == 1
    assert sorted(path.name for path in Path().glob("*.mp4")) == ["a.mp4", "d.mp4"]
    assert "line 2: actions" in done.err
    assert "line 3: image" in done.err
    assert "batch: 2 of 4 jobs done, 2 failed (lines 2, 3)" in done.out


def test_batch_without_fault_is_ok() -> None:
    Path("jobs.jsonl").write_text('{"out": "a.mp4", "actions": "w*17"}\n')
    assert main(["generate", "--batch", "jobs.jsonl", "--image", "seed.png", *TINY]) == 0


def test_full_disk_removes_the_video_and_keeps_the_trace(
    capsys: pytest.CaptureFixture[str],
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, hard))
    try:
        code = main(_generate("--out", "a.mp4", "--png", "frames", "--chunks", "40"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 1
    assert "File too large" in capsys.readouterr().err
    assert sorted(path.name for path in Path().iterdir()) == ["a.trace.jsonl", "seed.png"]
    assert len(read_trace("a.trace.jsonl").chunks) > 0


def _until(claim: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + 120.0
    while not claim():
        assert time.monotonic() < deadline_s, f"waited 120 s for {what}"
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stop_leaves_a_playable_video(number: signal.Signals) -> None:
    command = [sys.executable, "-m", "stream.cli", *_generate("--out", "a.mp4", "--chunks", "9999")]
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    trace = Path("a.trace.jsonl")

    def has_chunks() -> bool:
        assert process.poll() is None, process.stderr
        return trace.exists() and trace.read_text().count('"chunk"') >= 2

    _until(has_chunks, "two chunks")
    process.send_signal(number)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "stopped after" in err
    end = read_trace(trace).end
    assert end is not None
    assert end.interrupted
    assert _frame_count("a.mp4") == end.frame_count == 17 * end.chunk_count


@pytest.mark.parametrize(
    "options",
    [
        ["--image", "gone.png"],
        ["--image", "page.png"],
        ["--prompt", "a\x07b"],
        ["--prompt", "x" * 100_000],
        ["--seed", "-1"],
        ["--seed", "1.5"],
        ["--seed", str(2**64)],
        ["--seed", "abc"],
        ["--actions", "hop*3"],
        ["--chunks", "0"],
        ["--out", "gone/a.mp4"],
        ["--preset", "maxi"],
        ["--weights", "nowhere"],
    ],
    ids=lambda options: " ".join(options)[:24],
)
def test_bad_input_is_one_line_and_code_2(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("page.png").write_text("<html></html>")
    base = {"--image": "seed.png", "--actions": "w*17", "--out": "a.mp4"}
    base[options[0]] = options[1]
    code = main(["generate", *(part for pair in base.items() for part in pair)])
    done = capsys.readouterr()
    assert code == 2
    assert done.out == ""
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1
    assert len(done.err) < 400
    assert not Path("a.mp4").exists()


@pytest.mark.parametrize("arguments", [["--seed", "-1"], ["--help"]])
def test_torch_is_not_imported_before_input_is_sound(arguments: list[str]) -> None:
    program = f"""
import sys
from stream.cli import main
try:
    main({["generate", "--image", "seed.png", "--actions", "w*17", "--out", "a.mp4", *arguments]!r})
except SystemExit:
    pass
heavy = {{"torch", "av", "rich.progress", "structlog"}} & set(sys.modules)
sys.exit(str(sorted(heavy)) if heavy else 0)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_unknown_scene_lists_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["generate", "--scene", "moon", "--actions", "w*17", "--out", "a.mp4"])
    assert code == 2
    assert "mars-rocks" in capsys.readouterr().err


def test_large_model_is_refused_with_needed_and_present_memory(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.device.available_gib", lambda device: 4.0)
    options = ["--image", "seed.png", "--actions", "w*17", "--out", "a.mp4"]
    code = main(["generate", *options, "--preset", "h3_33b", "--weights", "random"])
    err = capsys.readouterr().err
    assert code == 3
    assert "4.0 GiB are free" in err
    assert "needs about" in err


def test_unknown_option_is_bad_usage() -> None:
    with pytest.raises(SystemExit) as left:
        main(["generate", "--sed", "1"])
    assert left.value.code == 2
