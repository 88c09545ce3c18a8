"""Prompts on their way: encoded by a thread of their own while chunks are made.

Owns the order of the prompts of a session that are not applied yet, and the thread. Invariants:
prompts are applied in the order in which they came; one that is at hand and has none before it
never waits for the thread.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from engine.errors import WorldStreamError
from stream.live_rollout import LiveRollout
from stream.worker_messages import Applied, Refused, Report, SetPrompt

_log = logging.getLogger(__name__)


class PromptAhead:
    """Prompts of one session at a time.

    Args:
        on_ready: called from the thread when a prompt is encoded, or refused.
    """

    def __init__(self, on_ready: Callable[[], None]) -> None:
        self._on_ready = on_ready
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prompts")
        self._waiting: deque[tuple[SetPrompt, Future[None]]] = deque()

    def newest(self, rollout: LiveRollout) -> str:
        """Prompt that a rollout will have once all are applied."""
        return self._waiting[-1][0].prompt if self._waiting else rollout.newest_prompt

    def add(self, rollout: LiveRollout, command: SetPrompt) -> None:
        """Begin to encode a prompt, after those before it."""
        future: Future[None] = Future()
        if not self._waiting and rollout.world.is_prompt_at_hand(command.prompt):
            future.set_result(None)
        else:
            future = self._thread.submit(rollout.world.prepare_prompt, command.prompt)
            future.add_done_callback(lambda _: self._on_ready())
        self._waiting.append((command, future))

    def apply(self, rollout: LiveRollout, epoch: int, report: Callable[[Report], None]) -> None:
        """Apply what is encoded, from the next chunk on, and answer for it.

        What cannot be encoded is refused: too long, not kept where there is no encoder, no memory.
        The world does not know of it.
        """
        while self._waiting and self._waiting[0][1].done():
            command, future = self._waiting.popleft()
            try:
                future.result()
                rollout.switch_prompt(command.prompt)
            except WorldStreamError as error:
                _log.warning("prompt_refused detail=%s", error)
                report(Refused(id=command.id, detail=str(error)))
            else:
                report(Applied(id=command.id, epoch=epoch, chunk=rollout.chunk_index))

    def drop(self) -> list[SetPrompt]:
        """Take all prompts away; what is under way is encoded for nothing."""
        dropped = [command for command, _ in self._waiting]
        for _, future in self._waiting:
            future.cancel()
        self._waiting.clear()
        return dropped

    def close(self) -> None:
        """Wait for the prompt under way."""
        self.drop()
        self._thread.shutdown()
