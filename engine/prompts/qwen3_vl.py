"""The layers of a Qwen3-VL that an H3 model reads, and where their weights stay.

Owns the model: built without memory, cut after the layer that is read, its last norm left out, so
that what comes out is the hidden state as it is; filled from disk by name. And its residency: on
the engine's device, in the machine's memory, or nowhere, where each prompt reads the weights layer
by layer and gives them up. Invariants: the same bits in all three on one device; later layers and
the head are never in memory; nothing is computed at random.

Source: Qwen3-VL of transformers; hidden_states[50] as MiniMax-H3 reads it.
Shape suffixes: B batch, R rows, E width.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from engine.checkpoint.reading import LoadProgress, OnLoad, TensorReader
from engine.checkpoint.shards import DTYPES
from engine.config import PromptResidency
from engine.device import within_memory
from engine.errors import CheckpointError, StateError, UnsupportedError
from engine.prompts.files import PromptFiles
from engine.prompts.presentation import Presentation, Presenter
from engine.text import PromptEncoding

ATTENTION = "sdpa"
"""torch's own: causal without a mask, and the same bits each time."""
_EMBEDDING = "language_model.embed_tokens.weight"
_log = logging.getLogger(__name__)


class Qwen3VlEncoder:
    """Turns a picture and a prompt into rows. One thread at a time computes; any may ask.

    Args:
        files: what `find_encoder` found.
        layers: of the text that run.
        caption_rows: most tokens of a prompt.
        device: of the engine.
        residency: "gpu" keeps the weights on `device`; "cpu" in the machine's memory, and computes
            there; "free" reads them for each prompt, computes on `device` and keeps none.
        on_progress: called while weights are read.

    Raises: CheckpointError, UnsupportedError without transformers.
    """

    def __init__(
        self,
        files: PromptFiles,
        *,
        layers: int,
        caption_rows: int,
        device: torch.device,
        residency: PromptResidency,
        on_progress: OnLoad | None = None,
    ) -> None:
        self._files = files
        self.device = torch.device("cpu") if residency == "cpu" else device
        self.residency = residency
        self._presenter = _import(
            lambda: Presenter(files.tokenizer, files.processor, caption_rows=caption_rows)
        )
        self._model = _cut_model(files, layers)
        self._check_image_token()
        self._units = _units(self._model)
        self._check_tensors()
        self._lock = threading.Lock()
        self._is_closed = False
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        if residency != "free":
            with self._reader(on_progress) as reader:
                for name, unit in self._units.items():
                    self._fill(name, unit, reader)
        if self._stream is not None:  # it reads what another stream has written
            torch.cuda.synchronize(self.device)

    @torch.no_grad()
    def encode(self, prompt: str, picture_HWC: Tensor) -> PromptEncoding:
        """Return the rows of a prompt on the CPU, in the dtype of the weights.

        Raises: ConfigError for a prompt that is too long or holds a token of pictures,
            OutOfMemoryError, StateError after `close`.
        """
        begin_s = time.perf_counter()
        with self._lock:
            if self._is_closed:
                raise StateError("the prompt encoder is closed; expected calls before close()")
            shown = self._presenter.present(prompt, picture_HWC)
            # A stream of its own: chunks that are made meanwhile do not wait for it.
            beside = torch.cuda.stream(self._stream) if self._stream else nullcontext()
            with beside, self._weights():
                rows_BRE = within_memory(
                    self.device, "the prompt encoder", lambda: self._run(shown).cpu()
                )
        _log.info(
            "prompt_encoded rows=%d s=%.2f residency=%s device=%s",
            rows_BRE.shape[1], time.perf_counter() - begin_s, self.residency, self.device,
        )  # fmt: skip
        return PromptEncoding(rows_BRE=rows_BRE, tags_R=shown.tags_R)

    def close(self) -> None:
        """Free the weights; nothing can be encoded any more."""
        with self._lock:
            self._is_closed = True
            for unit in self._units.values():
                _empty(unit)

    def _run(self, shown: Presentation) -> Tensor:
        ids_BR = shown.ids_R[None].to(self.device)
        output = self._model(
            input_ids=ids_BR,
            attention_mask=torch.ones_like(ids_BR),
            mm_token_type_ids=shown.is_picture_R[None].to(self.device),
            pixel_values=shown.patches_PC.to(self.device),
            image_grid_thw=shown.grid_13.to(self.device),
            use_cache=False,
        )
        rows_BRE: Tensor = output.last_hidden_state
        return rows_BRE

    @contextmanager
    def _reader(self, on_progress: OnLoad | None = None) -> Iterator[TensorReader]:
        progress = LoadProgress(self._files.size_bytes, on_progress)
        reader = TensorReader(self.device, progress)
        try:
            yield reader
        finally:
            reader.close()
            progress.end()

    @contextmanager
    def _weights(self) -> Iterator[None]:
        """Have the weights of each part at hand while it runs."""
        if self.residency != "free":
            yield
            return
        hooks = []
        with self._reader() as reader:
            try:
                for name, unit in self._units.items():
                    fill = functools.partial(self._fill_before, reader, name)
                    hooks.append(unit.register_forward_pre_hook(fill))
                    hooks.append(unit.register_forward_hook(_empty_after))
                yield
            finally:
                for hook in hooks:
                    hook.remove()
                for unit in self._units.values():
                    _empty(unit)

    def _fill(self, prefix: str, unit: nn.Module, reader: TensorReader) -> None:
        """Read the weights of one part to the device."""
        for name, parameter in list(unit.named_parameters()):
            value = torch.empty(parameter.shape, dtype=parameter.dtype, device=self.device)
            value.copy_(reader.read(self._files.records[f"{prefix}.{name}"]))
            _replace(unit, name, value)

    def _fill_before(
        self, reader: TensorReader, prefix: str, unit: nn.Module, inputs: object
    ) -> None:
        self._fill(prefix, unit, reader)

    def _check_tensors(self) -> None:
        """Hold names and shapes of the file against the model, before anything is read."""
        wanted = dict(self._model.named_parameters())
        records = self._files.records
        for name, record in records.items():
            if name not in wanted:
                raise CheckpointError(
                    f"{record.path}: unknown tensor {record.name}; expected those of a Qwen3-VL"
                )
            if record.shape != tuple(wanted[name].shape):
                raise CheckpointError(
                    f"{record.path}: tensor {record.name} has a wrong shape: expected "
                    f"{list(wanted[name].shape)}, got {list(record.shape)}"
                )
        missing = sorted(wanted.keys() - records.keys())
        if missing:
            raise CheckpointError(
                f"{self._files.weights}: {len(missing)} tensors are missing, first {missing[0]}; "
                f"expected {len(wanted)} tensors"
            )

    def _check_image_token(self) -> None:
        expected = self._model.config.image_token_id
        if self._presenter.image_pad_id != expected:
            raise CheckpointError(
                f"{self._files.tokenizer}: <|image_pad|> is token {self._presenter.image_pad_id}; "
                f"expected {expected}, as {self._files.weights} says"
            )


def _import(open_: Callable[[], Presenter]) -> Presenter:
    try:
        return open_()
    except ImportError as error:
        raise UnsupportedError(
            f"prompt encoder: {error.name or error} is not installed; it needs transformers: "
            "pip install 'worldstream[h3]'"
        ) from error


def _cut_model(files: PromptFiles, layers: int) -> Any:
    """Model on no device, with the layers that run."""
    from transformers import Qwen3VLConfig, Qwen3VLModel

    try:
        config = Qwen3VLConfig(**files.config)
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{files.weights / 'config.json'} is not usable: {error}") from error
    text: Any = config.text_config
    text.num_hidden_layers = layers
    config._attn_implementation = ATTENTION
    embedding = files.records.get(_EMBEDDING)
    if embedding is None:
        raise CheckpointError(f"{files.weights}: tensor {_EMBEDDING} is missing")
    with torch.device("meta"):
        model: Any = Qwen3VLModel(config)
    model = model.to(DTYPES[embedding.dtype]).requires_grad_(False).eval()
    # The last norm comes after what is read.
    model.language_model.norm = nn.Identity()
    # Frequencies are computed, not stored, and stay fp32: they need memory from the start.
    model.language_model.rotary_emb = type(model.language_model.rotary_emb)(config.text_config)
    model.visual.rotary_pos_emb = type(model.visual.rotary_pos_emb)(config.vision_config)
    return model


def _units(model: nn.Module) -> dict[str, nn.Module]:
    """Parts of a model that run one after the other, whose weights are read together."""
    units: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        is_layer = name.rpartition(".")[0] in ("language_model.layers", "visual.blocks")
        is_inside = any(name.startswith(f"{outer}.") for outer in units)
        if not is_inside and (is_layer or any(True for _ in module.parameters(recurse=False))):
            units[name] = module
    return units


def _replace(unit: nn.Module, name: str, value: Tensor) -> None:
    owner, _, attribute = name.rpartition(".")
    parameter = nn.Parameter(value, requires_grad=False)
    setattr(unit.get_submodule(owner), attribute, parameter)


def _empty_after(unit: nn.Module, inputs: object, output: object) -> None:
    _empty(unit)


def _empty(unit: nn.Module) -> None:
    """Give the weights of a part up."""
    for name, parameter in list(unit.named_parameters()):
        if parameter.device.type != "meta":
            _replace(unit, name, torch.empty_like(parameter, device="meta"))
