"""Prompts: words for styles and scene kinds, templates, and the way back from text to a style.

Owns: the vocabulary of the small world.
Invariants: no word stands for two things; a prompt never contradicts the picture, it only omits.
"""

import random
import re

from miniworld.layouts import KINDS
from miniworld.styles import PLACES, TIMES, style_for

__all__ = ["KINDS", "KNOWN_WORDS", "PLACES", "TIMES", "parse_prompt", "prompt_for", "style_for",
           "unnamed_prompt"]  # fmt: skip

_PLACE_WORDS = {
    "meadow": ("meadow", "grass", "green", "grassland"),
    "desert": ("desert", "sand", "dunes", "sandy"),
    "snow": ("snow", "winter", "ice", "snowy"),
    "mars": ("mars", "martian", "planet"),
}
_TIME_WORDS = {
    "day": ("day", "noon", "bright", "daylight"),
    "sunset": ("sunset", "dusk", "evening"),
    "night": ("night", "moonlit", "dark", "midnight"),
    "fog": ("fog", "foggy", "misty", "mist"),
}
_KIND_WORDS = {
    "forest": ("forest", "trees", "woods"),
    "city": ("city", "towers", "houses", "town"),
    "ruins": ("ruins", "walls", "gates", "columns"),
    "rocks": ("rocks", "boulders", "stones"),
    "lake": ("lake", "water", "pond", "ponds"),
    "mixed": (),
}
_PLACE_PHRASES = {
    "meadow": ("a meadow", "green grass", "a grassland", "a green meadow"),
    "desert": ("a desert", "sand", "dunes", "a sandy desert"),
    "snow": ("snow", "a winter land", "ice and snow", "a snowy land"),
    "mars": ("mars", "the red planet", "a martian land", "planet mars"),
}
_TIME_PHRASES = {
    "day": ("in bright daylight", "by day", "at noon", "on a bright day"),
    "sunset": ("at sunset", "at dusk", "in the evening"),
    "night": ("at night", "on a moonlit night", "in the dark", "at midnight"),
    "fog": ("in fog", "on a foggy day", "in the mist", "on a misty day"),
}
_KIND_PHRASES = {
    "forest": ("a forest", "trees", "woods"),
    "city": ("a city", "towers", "houses", "a town"),
    "ruins": ("ruins", "walls and gates", "old columns"),
    "rocks": ("rocks", "boulders", "stones"),
    "lake": ("a lake", "ponds", "water and trees"),
    "mixed": ("things", "a walk"),
}
_FILLERS = ("a", "an", "and", "at", "beautiful", "by", "calm", "in", "land", "of", "old", "on",
            "place", "quiet", "scene", "somewhere", "strange", "the", "things", "view", "walk",
            "wide", "with", "red", "over", "near")  # fmt: skip
_UNNAMED = ("", "", "a strange place", "somewhere", "a quiet place", "a photograph", "a picture",
            "another world", "a wide view")  # fmt: skip
_CONSONANTS, _VOWELS = "bcdfghklmnprstvz", "aeiou"

KNOWN_WORDS: tuple[str, ...] = tuple(
    sorted(
        {word for table in (_PLACE_WORDS, _TIME_WORDS, _KIND_WORDS)
         for words in table.values() for word in words} | set(_FILLERS)
    )
)  # fmt: skip
"""Words worth an embedding of their own: styles, kinds and common template words."""

_MEANING = {
    word: (position, name)
    for position, table in enumerate((_PLACE_WORDS, _KIND_WORDS, _TIME_WORDS))
    for name, words in table.items()
    for word in words
}


def _unknown_word(rng: random.Random) -> str:
    while True:
        pairs = (rng.choice(_CONSONANTS) + rng.choice(_VOWELS) for _ in range(rng.randint(2, 4)))
        word = "".join(pairs)
        if word not in KNOWN_WORDS:
            return word


def prompt_for(rng: random.Random, place: str, kind: str, time: str) -> str:
    """Write one prompt that fits; the kind or the time may be left out, fillers may be added."""
    place_phrase = rng.choice(_PLACE_PHRASES[place])
    kind_phrase = rng.choice(_KIND_PHRASES[kind]) if rng.random() < 0.75 else ""
    time_phrase = rng.choice(_TIME_PHRASES[time]) if rng.random() < 0.9 else ""
    if kind_phrase:
        body = rng.choice(
            (
                f"{kind_phrase} in {place_phrase}",
                f"{place_phrase} with {kind_phrase}",
                f"{place_phrase}, {kind_phrase}",
            )
        )
    else:
        body = place_phrase
    parts = [body, time_phrase] if rng.random() < 0.7 else [time_phrase, body]
    roll = rng.random()
    if roll < 0.12:
        lead = rng.choice(("a beautiful view of", "a calm scene with", "a wide view of"))
        parts = [lead, body, time_phrase]
    elif roll < 0.22:
        parts.append(rng.choice(("calm", "quiet", "beautiful", "old")))
    elif roll < 0.32:
        parts.insert(rng.randint(0, len(parts)), _unknown_word(rng))
    return " ".join(part for part in parts if part)


def unnamed_prompt(rng: random.Random) -> str:
    """Write a prompt that names no style, for worlds whose colours have no name."""
    if rng.random() < 0.3:
        return " ".join(_unknown_word(rng) for _ in range(rng.randint(1, 3)))
    return rng.choice(_UNNAMED)


def parse_prompt(prompt: str) -> tuple[str | None, str | None, str | None]:
    """Read (place, kind, time) from a prompt; the first word of each sort wins, else None.

    "a foggy day" is fog: weather beats the plain word for day.
    """
    found: list[str | None] = [None, None, None]
    for word in re.findall(r"[a-z]+", prompt.lower()):
        if word not in _MEANING:
            continue
        position, name = _MEANING[word]
        if found[position] is None or (position == 2 and found[2] == "day"):
            found[position] = name
    return found[0], found[1], found[2]
