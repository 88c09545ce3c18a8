"""The training command: shards, export, latents of clips, processes that train together."""

from __future__ import annotations

import dataclasses
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.text import WordEncoder
from miniworld import train
from miniworld.scene import sample_clips
from miniworld.stages.flow import FlowConfig, TrainedModel
from miniworld.stages.latents import ClipCache, clip_views, encode_clips
from vae_stream.taehv import TinyVae, TinyVaeConfig

pytestmark = pytest.mark.cpu
CPU = torch.device("cpu")


def test_every_stage_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for stage in ("vae", "flow", "distil", "export"):
        with pytest.raises(SystemExit) as stopped:
            train.main([stage, "--help"])
        assert stopped.value.code == 0
        assert "--out" in capsys.readouterr().out


def test_shards_stay_below_the_limit_and_come_back(tmp_path: Path) -> None:
    state = {f"part{i}": torch.randn(1024, 3000) for i in range(3)}
    train.save_shards(tmp_path, "flow", state)
    sizes = [path.stat().st_size for path in tmp_path.glob("flow-*.safetensors")]
    assert len(sizes) == 2
    assert max(sizes) < 16 * 2**20
    back = train.load_shards(tmp_path, "flow")
    assert all(torch.equal(back[name], value.bfloat16().float()) for name, value in state.items())


def test_missing_shards_name_the_stage_to_run(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="run stage 'distil' first"):
        train.load_shards(tmp_path, "distil")


def test_exported_folder_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = dataclasses.replace(train.mini_config(), num_layers=1, hidden_size=64)
    monkeypatch.setattr(train, "mini_config", lambda: small)
    trained = TrainedModel(small, FlowConfig(), CPU)
    train.save_shards(tmp_path, "distil", trained.averaged_state())
    TinyVae(TinyVaeConfig()).save_pretrained(tmp_path / "vae")
    train.main(["export", "--out", str(tmp_path), "--to", str(tmp_path / "weights")])
    engine = Engine.from_pretrained(tmp_path / "weights", EngineConfig(device="cpu"))
    assert engine.model_config == small
    assert (tmp_path / "weights" / "vae" / "model.safetensors").exists()
    back = train.shipped_state(tmp_path / "weights")
    assert set(back) == set(trained.averaged_state())
    trained.load_weights(back)


@pytest.fixture(scope="module")
def tools() -> tuple[TinyVae, WordEncoder]:
    torch.manual_seed(0)
    text = train.mini_config().text
    return TinyVae(TinyVaeConfig()).eval(), WordEncoder(
        text.vocabulary, text.unknown_buckets, text.rows, 8
    )


def test_encoded_clips_have_the_layout_of_the_engine(tools: tuple[TinyVae, WordEncoder]) -> None:
    clips = sample_clips(1, 1, seed=4, mid_session_share=0.0)
    made = encode_clips(*tools, clips, CPU)
    assert made.latents_BNRC.shape == (1, 1, 200, 96)
    assert made.anchor_BRC.shape == (1, 40, 96)
    # A block's first latent sees its first frame alone, which is the session's first picture here.
    torch.testing.assert_close(
        made.latents_BNRC[0, 0, :40].float(), made.anchor_BRC[0], atol=2e-2, rtol=2**-8
    )
    assert torch.equal(made.views_BT44[0, 0], torch.eye(4))


def test_views_of_a_mid_session_clip_are_far_from_its_start() -> None:
    clips = sample_clips(4, 1, seed=4, mid_session_share=1.0)
    assert (clip_views(clips)[:, :, :3, 3].norm(dim=-1) > 2.0).all()


def test_cache_on_disk_equals_the_one_made(
    tmp_path: Path, tools: tuple[TinyVae, WordEncoder]
) -> None:
    def build() -> ClipCache:
        return ClipCache.build(
            *tools,
            groups=1,
            clips_per_group=1,
            chunks=1,
            seed=3,
            device=CPU,
            folder=tmp_path,
            log=lambda _line: None,
        )

    made, read = build(), build()
    assert made.groups[0].switch_chunk == read.groups[0].switch_chunk
    for field in dataclasses.fields(made.groups[0]):
        first, again = (getattr(each.groups[0], field.name) for each in (made, read))
        assert first == again if isinstance(first, int) else torch.equal(first, again)
    assert read.batch(3, random.Random(0), CPU).latents_BNRC.shape[0] == 3


def test_two_processes_average_and_agree(tmp_path: Path) -> None:
    script = tmp_path / "pair.py"
    script.write_text(
        "import sys\n"
        "import torch\n"
        "from miniworld.stages.ranks import Ranks\n"
        "ranks = Ranks.start()\n"
        "pair = [torch.full((2,), float(ranks.rank)), torch.full((3,), 10.0 * ranks.rank)]\n"
        "ranks.mean_(pair)\n"
        "said = ranks.first_says(7.0 + ranks.rank)\n"
        "path = f'{sys.argv[1]}/{ranks.rank}.txt'\n"
        "with open(path, 'w') as file:\n"
        "    print(ranks.count, pair[0].tolist(), pair[1].tolist(), said, file=file)\n"
        "ranks.close()\n"
    )
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    subprocess.run(
        [*command, str(script), str(tmp_path)],
        timeout=300,
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    said = [(tmp_path / f"{rank}.txt").read_text() for rank in (0, 1)]
    assert said == ["2 [0.5, 0.5] [5.0, 5.0, 5.0] 7.0\n"] * 2
