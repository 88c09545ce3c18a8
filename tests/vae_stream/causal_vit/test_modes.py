"""Plans of pushes: what is decoded together, and when pictures come."""

import pytest

from vae_stream.causal_vit.modes import FIRST, PAIR, SECOND, Mode, kinds, plan_flush, plan_push

pytestmark = pytest.mark.cpu

EXPECTED = {
    Mode.PAIR: "- 01 - 23 - 45 - 67 - 89 - AB",
    Mode.SINGLE_A1: "0 1 2 3 4 5 6 7 8 9 A B",
    Mode.SINGLE_A4: "0 1 2 3 4 5 6 7 8 9 A B",
    Mode.SINGLE_A5: "0 1 2 3 4 5 6 7 8 9 A B",
    Mode.PREVIEW_COMMIT_A2: "0 1 2 3 4 5 6 7 8 9 A B",
    Mode.HYBRID_A3: "- 01 - 23 4 5 - 67 - 89 - AB",
}
KINDS = {
    Mode.PAIR: "-P-P-P-P-P-P",
    Mode.SINGLE_A1: "SSSSSSSSSSSS",
    Mode.SINGLE_A4: "FFFFFFFFFFFF",
    Mode.SINGLE_A5: "FSFSFSFSFSFS",
    Mode.PREVIEW_COMMIT_A2: "FPFPFPFPFPFP",
    Mode.HYBRID_A3: "-P-PFP-P-P-P",
}


@pytest.mark.parametrize("mode", Mode)
def test_each_latent_gives_its_pictures_once_and_in_order(mode: Mode) -> None:
    shown, made, waiting, is_shown = [], "", 0, False
    for index in range(12):
        step = plan_push(
            mode,
            is_odd=index % 2 == 1,
            ends_chunk=index % 5 == 4,
            is_waiting=bool(waiting),
            is_shown=is_shown,
        )
        shown.append("".join(f"{index - waiting + at:X}" for at in step.shown) or "-")
        made += {None: "-", PAIR: "P", FIRST: "F", SECOND: "S"}[step.kind]
        assert step.kind is None or step.kind in kinds(mode)
        waiting, is_shown = int(step.waits), step.waits and bool(step.shown)
    assert " ".join(shown) == EXPECTED[mode]
    assert made == KINDS[mode]


@pytest.mark.parametrize("mode", Mode)
def test_no_mode_needs_more_than_three_recordings(mode: Mode) -> None:
    assert 1 <= len(kinds(mode)) <= 2


def test_the_end_shows_what_waits() -> None:
    assert plan_flush(Mode.PAIR, is_waiting=True, is_shown=False).kind == PAIR
    assert plan_flush(Mode.PAIR, is_waiting=True, is_shown=False).shown == (0,)
    assert plan_flush(Mode.HYBRID_A3, is_waiting=True, is_shown=False).kind == FIRST
    assert plan_flush(Mode.HYBRID_A3, is_waiting=True, is_shown=True).kind is None
    assert plan_flush(Mode.SINGLE_A4, is_waiting=False, is_shown=False).kind is None
