"""Key scripts: which keys are held at which frame.

Owns the grammar, its reader and the cut into actions of one chunk each. Two forms:

    w*34 wd*17 left*17 w+boost*20 -*5      each item: keys, `*`, number of frames (24 a second)
    {"frame": 0, "keys": ["w"]}            JSON lines: what is held from this frame on
    {"frame": 34, "keys": ["w", "left"]}   (`time_s` may stand instead of `frame`)
    {"frame": 51, "prompt": "snow"}        a new prompt, from the first chunk that begins then

Keys: w a s d (walk), left right up down (look), boost or shift (faster), `-` or none (nothing).
`+` joins keys; letters of w a s d may also be written together. A file may hold either form; in the
first, `#` starts a comment. After the last item of the first form nothing is held; the last line of
the second form holds until the video ends. A script longer than the video is cut.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine.config import FRAMES_PER_LATENT
from engine.errors import ConfigError

if TYPE_CHECKING:
    from engine.types import Action

FRAMES_PER_SECOND = 24
FRAMES_PER_CHUNK = sum(FRAMES_PER_LATENT)
FRAME_COUNT_LIMIT = 1_000_000
FILE_LIMIT_BYTES = 4 * 1024 * 1024

# Values are names of `engine.types.Control`, as text: a script is checked before torch is imported.
KEYS: dict[str, str | None] = {
    "w": "forward",
    "s": "back",
    "a": "left",
    "d": "right",
    "left": "look_left",
    "right": "look_right",
    "up": "look_up",
    "down": "look_down",
    "boost": "boost",
    "shift": "boost",
    "-": None,
    "none": None,
}
ALLOWED_KEYS = ", ".join(KEYS)


@dataclass(frozen=True, kw_only=True, slots=True)
class KeySpan:
    """Controls held over a number of frames, by name."""

    keys: frozenset[str]
    frame_count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyScript:
    """Spans one after the other, and what is held after the last of them."""

    spans: tuple[KeySpan, ...]
    held_after: frozenset[str] = frozenset()
    prompts: tuple[tuple[int, str], ...] = ()
    """(frame, new prompt), in order."""

    @property
    def frame_count(self) -> int:
        """Frames up to the end of the last span."""
        return sum(span.frame_count for span in self.spans)

    @property
    def chunk_count(self) -> int:
        """Chunks that hold the whole script; at least one."""
        return max(1, -(-self.frame_count // FRAMES_PER_CHUNK))

    def keys(self) -> Iterator[frozenset[str]]:
        """Held keys frame by frame, without end."""
        for span in self.spans:
            for _ in range(span.frame_count):
                yield span.keys
        while True:
            yield self.held_after

    def prompt_for(self, chunk_index: int) -> str | None:
        """Return the prompt that takes over at this chunk, or None."""
        begin = chunk_index * FRAMES_PER_CHUNK
        due = [text for frame, text in self.prompts if begin - FRAMES_PER_CHUNK < frame <= begin]
        return due[-1] if due else None

    def actions(self, chunk_count: int) -> Iterator[Action]:
        """One action for each of `chunk_count` chunks."""
        from engine.types import Action, Control

        keys = self.keys()
        for _ in range(chunk_count):
            held = [[Control(name) for name in next(keys)] for _ in range(FRAMES_PER_CHUNK)]
            yield Action.from_keys(held)


def load_script(value: str) -> KeyScript:
    """Read a script given as text or as the name of a file.

    A value is taken as a file's name if such a file exists, or if it has a `/` or ends in .txt,
    .json or .jsonl.

    Raises:
        ConfigError: no such file, file too large or not text, or a fault in the script.
    """
    if not _names_a_file(value):
        return parse_script(value)
    path = Path(value)
    try:
        with path.open("rb") as file:
            data = file.read(FILE_LIMIT_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"actions: cannot read {value!r}: {error.strerror}") from error
    if len(data) > FILE_LIMIT_BYTES:
        raise ConfigError(f"actions: {value!r} is larger than {FILE_LIMIT_BYTES} bytes")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"actions: {value!r} is not UTF-8 text") from error
    if text.lstrip().startswith("{"):
        return parse_timed_keys(text)
    return parse_script("\n".join(line.partition("#")[0] for line in text.splitlines()))


def parse_script(text: str) -> KeyScript:
    """Read the short form.

    Raises:
        ConfigError: names the item, its position (1 is the first) and what is allowed.
    """
    items = text.split()
    if not items:
        raise ConfigError('actions: the script is empty; write for example "w*34 left*17"')
    spans = tuple(_span(item, position) for position, item in enumerate(items, start=1))
    script = KeyScript(spans=spans)
    if script.frame_count > FRAME_COUNT_LIMIT:
        raise ConfigError(
            f"actions: {script.frame_count} frames in all; allowed: at most {FRAME_COUNT_LIMIT}"
        )
    return script


def parse_timed_keys(text: str) -> KeyScript:
    """Read the form in JSON lines.

    Raises:
        ConfigError: names the line and what is allowed.
    """
    spans: list[KeySpan] = []
    prompts: list[tuple[int, str]] = []
    held: frozenset[str] = frozenset()
    last_frame = 0
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        state = _timed_line(line, f"actions, line {number}")
        if state.frame < last_frame:
            raise ConfigError(
                f"actions, line {number}: frame {state.frame} comes after frame {last_frame}; "
                "allowed: frames that do not go back"
            )
        if state.frame > last_frame:
            spans.append(KeySpan(keys=held, frame_count=state.frame - last_frame))
        last_frame = state.frame
        held = held if state.keys is None else state.keys
        if state.prompt is not None:
            prompts.append((state.frame, state.prompt))
    return KeyScript(spans=tuple(spans), held_after=held, prompts=tuple(prompts))


def _names_a_file(value: str) -> bool:
    if "\n" in value or "\0" in value or len(value) > 4096:
        return False
    if "/" in value or value.endswith((".txt", ".json", ".jsonl")):
        return True
    try:
        return Path(value).is_file()
    except OSError:
        return False


def _span(item: str, position: int) -> KeySpan:
    where = f"actions: item {position} ({_shown(item)})"
    names, star, count_text = item.rpartition("*")
    if not star:
        raise ConfigError(f"{where} has no number of frames; write for example {item[:20]}*17")
    if not (count_text.isascii() and count_text.isdigit()) or len(count_text) > 9:
        raise ConfigError(
            f"{where} has {_shown(count_text)} frames; allowed: 1 to {FRAME_COUNT_LIMIT}"
        )
    frame_count = int(count_text)
    if not 1 <= frame_count <= FRAME_COUNT_LIMIT:
        raise ConfigError(f"{where} has {frame_count} frames; allowed: 1 to {FRAME_COUNT_LIMIT}")
    return KeySpan(keys=_keys(names.split("+"), where), frame_count=frame_count)


def _keys(names: list[str], where: str) -> frozenset[str]:
    controls: set[str] = set()
    for name in names:
        lower = name.lower()
        if lower in KEYS:
            parts = [lower]
        elif lower and set(lower) <= set("wasd"):
            parts = list(lower)
        else:
            raise ConfigError(f"{where}: unknown key {_shown(name)}; allowed: {ALLOWED_KEYS}")
        controls.update(control for part in parts if (control := KEYS[part]) is not None)
    return frozenset(controls)


@dataclass(frozen=True, kw_only=True, slots=True)
class _TimedState:
    """One JSON line; what it does not name stays as it was."""

    frame: int
    keys: frozenset[str] | None
    prompt: str | None


def _timed_line(line: str, where: str) -> _TimedState:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {_shown(line)}") from error
    if not isinstance(data, dict) or len(data.keys() & {"frame", "time_s"}) != 1:
        raise ConfigError(f"{where} has no point of time; allowed: either frame or time_s")
    unknown = data.keys() - {"frame", "time_s", "keys", "prompt"}
    if unknown or not data.keys() & {"keys", "prompt"}:
        wrong = _shown(min(unknown)) if unknown else "nothing to do"
        raise ConfigError(f"{where}: {wrong}; allowed: keys, prompt")
    names, prompt = data.get("keys"), data.get("prompt")
    if "keys" in data and not (
        isinstance(names, list) and all(isinstance(name, str) for name in names)
    ):
        raise ConfigError(f"{where}: keys is {_shown(str(names))}; allowed: a list of key names")
    if "prompt" in data and not isinstance(prompt, str):
        raise ConfigError(f"{where}: prompt is {_shown(str(prompt))}; allowed: text")
    return _TimedState(
        frame=_frame(data, where),
        keys=None if names is None else _keys(names, where),
        prompt=prompt,
    )


def _frame(data: dict[str, object], where: str) -> int:
    name = "frame" if "frame" in data else "time_s"
    value = data[name]
    limit = FRAME_COUNT_LIMIT if name == "frame" else FRAME_COUNT_LIMIT // FRAMES_PER_SECOND
    is_number = isinstance(value, int if name == "frame" else (int, float))
    if isinstance(value, bool) or not is_number or not 0 <= value <= limit:  # type: ignore[operator]
        raise ConfigError(f"{where}: {name} is {_shown(str(value))}; allowed: 0 to {limit}")
    assert isinstance(value, int | float)
    return int(value) if name == "frame" else round(value * FRAMES_PER_SECOND)


def _shown(text: str) -> str:
    """Quoted for a message, on one line, not longer than a line."""
    return repr(text if len(text) <= 40 else text[:37] + "...")
