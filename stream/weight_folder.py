"""What lies in a folder of weights: which file or folder in it is which network, by content.

    DIR/                     names are free, at most three folders deep; what is told apart:
      transformer/           the diffusion transformer, in any layout that is read
      decoder/               a streaming decoder, such as the causal one
      vae/                   codec: encodes the first picture, decodes where there is nothing better
      text_encoder/          Qwen3-VL with its tokenizer
      adapter/               a LoRA
      audio_vae/             codec of sound, through which silence passes once; or what was kept

Owns the marks by which names of tensors tell networks apart; decoders and picture encoders are the
affair of `vae_stream`. Invariants: heads of files are read, never a tensor; no code of a pickle
runs; the weights that ship with `mini` and released ones are looked through alike; two places that
would serve alike are an error that names both, because FL2VA and Ref2VA, for one, differ in nothing
but their values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from engine.errors import CheckpointError

DEPTH = 3
_NAMED = 3
"""Files that an error names; more are counted."""


class Role(StrEnum):
    """What a place in the folder is good for."""

    TRANSFORMER = "transformer"
    DECODER = "decoder"
    PICTURE_ENCODER = "picture encoder"
    PROMPT_ENCODER = "prompt encoder"
    AUDIO_CODEC = "audio codec"
    ADAPTER = "adapter"


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightFolder:
    """Places of a folder by what they are good for."""

    path: Path
    places: Mapping[Role, tuple[Path, ...]]
    unknown: tuple[Path, ...]
    """Files of which nobody here knows what they are."""
    pickles: tuple[Path, ...] = ()
    """Files that may run code when they are read, but for adapters, which are opened for their
    tensors alone."""

    def find(self, role: Role) -> Path | None:
        """Return the place for a role, None where there is none.

        Raises: CheckpointError where there are several.
        """
        found = self.places.get(role, ())
        if len(found) > 1:
            names = ", ".join(str(each.relative_to(self.path)) for each in found)
            raise CheckpointError(
                f"weights: {self.path} has more than one {role}: {names}; expected one, so move "
                "the others away"
            )
        return found[0] if found else None

    def need(self, role: Role) -> Path:
        """Return the place for a role.

        Raises: CheckpointError where there is none, or where there are several.
        """
        found = self.find(role)
        if found is None:
            there = ", ".join(role for role, places in self.places.items() if places)
            raise CheckpointError(
                f"weights: {self.path} has no {role}; found: {there or 'no known network'}"
                f"{self._pickled()}"
            )
        return found

    def _pickled(self) -> str:
        if not self.pickles:
            return ""
        names = ", ".join(str(each.relative_to(self.path)) for each in self.pickles[:_NAMED])
        return f", and {len(self.pickles)} pickles ({names}); expected safetensors"

    def decoder(self, mode: str | None) -> Path | None:
        """Return the place of the decoder that is wanted most, or that has a mode.

        Raises: CheckpointError where none has it, or two are alike.
        """
        from vae_stream.opening import choose_decoder

        return self._choose(Role.DECODER, lambda places: choose_decoder(places, mode))

    def picture_encoder(self) -> Path | None:
        """Return the place of the picture encoder that is wanted most.

        Raises: CheckpointError where two are alike.
        """
        from vae_stream.encoder import choose_encoder

        return self._choose(Role.PICTURE_ENCODER, choose_encoder)

    def _choose(self, role: Role, choose: Callable[[Sequence[Path]], Path]) -> Path | None:
        places = self.places.get(role, ())
        try:
            return choose(places) if places else None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"weights: {error}") from error


def look_through(path: Path) -> WeightFolder:
    """Look through a folder and those below it.

    Raises: CheckpointError where it is no folder, or a file in it is damaged.
    """
    from engine.checkpoint.adapter_files import AVERAGES
    from engine.checkpoint.shards import PICKLE_SUFFIXES, indexed_names, read_shard

    if not path.is_dir():
        raise CheckpointError(f"weights: {path} is no folder")
    places: dict[Role, list[Path]] = {role: [] for role in Role}
    unknown: list[Path] = []
    pickles: list[Path] = []
    for folder in _folders(path, DEPTH):
        pickled = sorted(each for each in folder.iterdir() if each.suffix in PICKLE_SUFFIXES)
        files = sorted(folder.glob("*.safetensors"))
        names = {file: frozenset(read_shard(file).records) for file in files}
        if not any(Role.ADAPTER in roles_of(each) for each in names.values()):
            adapters = [each for each in pickled if _holds_adapter(each)]
            is_averaged = any(each.name == AVERAGES for each in adapters)
            places[Role.ADAPTER] += [folder] if is_averaged else adapters
            pickled = [each for each in pickled if each not in adapters]
        pickles += pickled
        if not names:
            continue
        by_file = {file: roles_of(each) for file, each in names.items()}
        kinds = {roles for roles in by_file.values() if roles}
        listed = indexed_names(folder)
        if len(kinds) > 1 and not listed:  # single files side by side
            for file, roles in by_file.items():
                for role in roles:
                    places[role].append(file)
                if not roles:
                    unknown.append(file)
            continue
        # Shards of one network: some may lack every mark, and some may not be there.
        roles = roles_of(listed.union(*names.values()))
        for role in roles:
            places[role].append(folder)
        if not roles:
            unknown += names
    return WeightFolder(
        path=path,
        places={role: tuple(found) for role, found in places.items()},
        unknown=tuple(unknown),
        pickles=tuple(pickles),
    )


def roles_of(names: frozenset[str]) -> frozenset[Role]:
    """What tensors of these names are good for."""
    from engine.silence import TENSOR as SILENCE
    from vae_stream.encoder import holds_encoder
    from vae_stream.opening import decoder_of

    def any_has(*parts: str) -> bool:
        return any(part in name for name in names for part in parts)

    if any_has(".lora_A.", ".lora_B.", ".lora_down.", ".lora_up.", "lora_A.weight"):
        return frozenset({Role.ADAPTER})
    if any_has("adaln_proj.linear."):
        return frozenset({Role.TRANSFORMER})
    if any_has("layers.0.self_attn.q_proj."):
        return frozenset({Role.PROMPT_ENCODER})
    if any_has(".weight_g") or SILENCE in names:
        return frozenset({Role.AUDIO_CODEC})
    roles = set()
    if decoder_of(names) is not None:
        roles.add(Role.DECODER)
    if holds_encoder(names):
        roles.add(Role.PICTURE_ENCODER)
    return frozenset(roles)


def _holds_adapter(file: Path) -> bool:
    """Whether a file of torch's own is an adapter, as a training run leaves its averages."""
    from engine.checkpoint.adapter_files import PICKLE_SUFFIX, PickledTensors

    if file.suffix != PICKLE_SUFFIX:
        return False
    try:
        return Role.ADAPTER in roles_of(frozenset(PickledTensors(file).shapes))
    except CheckpointError:
        return False


def _folders(path: Path, depth: int) -> Iterator[Path]:
    yield path
    if depth > 0:
        for each in sorted(path.iterdir()):
            if each.is_dir() and not each.name.startswith("."):
                yield from _folders(each, depth - 1)
