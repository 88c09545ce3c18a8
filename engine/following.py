"""An engine whose rollouts other processes share, and what those do.

    leader     encode, tell, new_rollout    tell, denoise    tell, commit ...
    follower               > new_rollout        > denoise        > commit ...

Owns the order of the calls that a leader passes on. Does not own processes, nor the way to them
(`Followers`). Invariants: every rank makes the same calls in the same order, and the leader tells
of one before it makes it; what is refused is refused by all ranks, before anything is exchanged,
and any other error of a call ends them all. The leader alone encodes prompts: it does so ahead of
their use, and no follower has to hold an encoder for the same rows.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn, Protocol

from torch import Tensor

from engine.calls import (
    Call,
    Close,
    Commit,
    Denoise,
    Drop,
    NewRollout,
    Restore,
    SetPrompt,
    Settle,
    TakeSnapshot,
    Undo,
)
from engine.engine import Engine
from engine.errors import ConfigError, StateError, UnsupportedError
from engine.loading import ModelParts
from engine.parallel import Exchange
from engine.rollout import Draws, Rollout, RolloutSnapshot
from engine.text import PromptEncoding
from engine.types import Action, LatentChunk

REFUSALS = (ConfigError, StateError, UnsupportedError)
"""What follows from the call and from what went before, so from the same on every rank."""


class Followers(Protocol):
    """The other ranks, as the leader sees them."""

    def tell(self, call: Call) -> None:
        """Let all of them make a call."""
        ...

    def agree(self) -> None:
        """Wait until all of them refused the call that this rank refused; end all where not."""
        ...

    def abandon(self, error: BaseException) -> NoReturn:
        """End all ranks at once, this one too."""
        ...


class LeadingEngine(Engine):
    """An engine that followers do everything with.

    Args:
        parts: of this rank.
        exchange: where the ranks share rollouts.
        followers: the other ranks, with an engine of the same source.
    """

    def __init__(self, parts: ModelParts, *, exchange: Exchange, followers: Followers) -> None:
        super().__init__(parts, exchange=exchange)
        self._followers = followers
        self._numbers: weakref.WeakKeyDictionary[Rollout, int] = weakref.WeakKeyDictionary()
        self._rollout_count = 0
        self._gone: list[int] = []

    def new_rollout(
        self,
        prompt: str,
        *,
        anchor_BCTHW: Tensor | None = None,
        picture_HWC: Tensor | None = None,
        seed: int = 0,
        epoch: int = 0,
        draws: Draws | None = None,
        encoding: PromptEncoding | None = None,
    ) -> Rollout:
        """See `Engine.new_rollout`. Raises: UnsupportedError for draws from elsewhere."""
        if draws is not None:
            raise UnsupportedError("draws: from elsewhere; allowed where ranks follow: the seed's")
        encoding = encoding or self.prompts.encode(prompt, picture_HWC)
        self._rollout_count += 1
        number = self._rollout_count
        call = NewRollout(
            rollout=number,
            prompt=prompt,
            encoding=_on_host(encoding),
            anchor_BCTHW=None if anchor_BCTHW is None else anchor_BCTHW.cpu(),
            seed=seed,
            epoch=epoch,
        )
        with self._led(call):
            rollout = super().new_rollout(
                prompt, anchor_BCTHW=anchor_BCTHW, picture_HWC=picture_HWC, seed=seed, epoch=epoch,
                encoding=encoding,
            )  # fmt: skip
        self._numbers[rollout] = number
        weakref.finalize(rollout, self._gone.append, number).atexit = False
        return rollout

    def set_prompt(
        self, rollout: Rollout, prompt: str, *, encoding: PromptEncoding | None = None
    ) -> None:
        """See `Engine.set_prompt`."""
        encoding = encoding or self.prompts.encode(prompt, rollout.picture_HWC)
        number = self._numbers[rollout]
        with self._led(SetPrompt(rollout=number, prompt=prompt, encoding=_on_host(encoding))):
            super().set_prompt(rollout, prompt, encoding=encoding)

    def denoise(
        self, rollout: Rollout, action: Action, *, leading_BCTHW: Tensor | None = None
    ) -> LatentChunk:
        """See `Engine.denoise`."""
        leading_on_host = None if leading_BCTHW is None else leading_BCTHW.cpu()
        number = self._numbers[rollout]
        with self._led(Denoise(rollout=number, action=action, leading_BCTHW=leading_on_host)):
            return super().denoise(rollout, action, leading_BCTHW=leading_BCTHW)

    def commit(self, rollout: Rollout, *, beside: bool = False) -> None:
        """See `Engine.commit`."""
        with self._led(Commit(rollout=self._numbers[rollout], beside=beside)):
            super().commit(rollout, beside=beside)

    def settle(self, rollout: Rollout) -> None:
        """See `Engine.settle`."""
        with self._led(Settle(rollout=self._numbers[rollout])):
            super().settle(rollout)

    def undo(self, rollout: Rollout) -> None:
        """See `Engine.undo`."""
        with self._led(Undo(rollout=self._numbers[rollout])):
            super().undo(rollout)

    def snapshot(self, rollout: Rollout) -> RolloutSnapshot:
        """See `Engine.snapshot`."""
        with self._led(TakeSnapshot(rollout=self._numbers[rollout])):
            return super().snapshot(rollout)

    def restore(self, rollout: Rollout, snapshot: RolloutSnapshot) -> None:
        """See `Engine.restore`."""
        with self._led(Restore(rollout=self._numbers[rollout], snapshot=_sendable(snapshot))):
            super().restore(rollout, snapshot)

    def close(self) -> None:
        """See `Engine.close`; the followers end with theirs."""
        if self._core is None:
            return
        with self._led(Close()):
            super().close()

    @contextmanager
    def _led(self, call: Call) -> Iterator[None]:
        """Tell the followers of a call that is made within.

        Raises: StateError after `close`, before anybody is told.
        """
        _ = self.core
        if self._gone:
            # Before the call: what a follower keeps of them may be what the next one needs.
            gone = tuple(self._gone)
            del self._gone[: len(gone)]
            self._followers.tell(Drop(rollouts=gone))
        self._followers.tell(call)
        try:
            yield
        except REFUSALS:
            self._followers.agree()
            raise
        # Whatever it was, the others may be within an exchange that this rank left.
        except BaseException as error:
            self._followers.abandon(error)


def follow(
    engine: Engine, receive: Callable[[], Call], on_refusal: Callable[[Exception], None]
) -> None:
    """Make the calls of the leader until it closes its engine.

    Args:
        engine: of this rank; closed at the end.
        receive: waits for the next call.
        on_refusal: hears of a call that is refused, which the leader has to refuse as well.

    Raises: whatever a call raises that is no refusal.
    """
    rollouts: dict[int, Rollout] = {}
    while not isinstance(call := receive(), Close):
        try:
            _make(call, engine, rollouts)
        except REFUSALS as error:
            on_refusal(error)
    rollouts.clear()
    engine.close()


def _make(call: Call, engine: Engine, rollouts: dict[int, Rollout]) -> None:
    match call:
        case NewRollout():
            rollouts[call.rollout] = engine.new_rollout(
                call.prompt,
                anchor_BCTHW=call.anchor_BCTHW,
                seed=call.seed,
                epoch=call.epoch,
                encoding=call.encoding,
            )
        case SetPrompt():
            engine.set_prompt(rollouts[call.rollout], call.prompt, encoding=call.encoding)
        case Denoise():
            rollout = rollouts[call.rollout]
            engine.denoise(rollout, call.action, leading_BCTHW=call.leading_BCTHW)
        case Commit():
            engine.commit(rollouts[call.rollout], beside=call.beside)
        case Settle():
            engine.settle(rollouts[call.rollout])
        case Undo():
            engine.undo(rollouts[call.rollout])
        case TakeSnapshot():
            engine.snapshot(rollouts[call.rollout])
        case Restore():
            engine.restore(rollouts[call.rollout], call.snapshot)
        case Drop():
            for number in call.rollouts:
                rollouts.pop(number, None)


def _on_host(encoding: PromptEncoding) -> PromptEncoding:
    return PromptEncoding(rows_BRE=encoding.rows_BRE.cpu(), tags_R=encoding.tags_R.cpu())


def _sendable(snapshot: RolloutSnapshot) -> RolloutSnapshot:
    """The snapshot in host memory, each tensor by itself: views would take along what they view."""
    buffers = {name: buffer.cpu().contiguous() for name, buffer in snapshot.buffers.items()}
    return RolloutSnapshot(
        chunk_index=snapshot.chunk_index, camera=snapshot.camera, buffers=buffers
    )
