"""Configuration of a world model: what the weights fix, and what a run may choose.

Owns: `ModelConfig` and its sections (read from `config.json` beside the weights), `EngineConfig`,
the presets. Invariants: everything is frozen; json is read strictly (a missing or unknown key is
an error that names it); nothing here touches torch or a device.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from engine.errors import ConfigError
from engine.strict_json import read_dataclass

PRESET_NAMES = ("mini", "h3_33b", "tiny")
BackendName = Literal[
    "auto", "sdpa", "cudnn", "cudnn_split", "flash", "flex", "fa3", "fa4", "gluon", "products",
    "math",
]  # fmt: skip
AttentionName = Literal[BackendName, "sparse"]
"""A backend for all groups of rows, or "sparse" for the chunk's rows over what is chosen else."""
CompileChoice = Literal["auto", "off", "blocks", "full"]
GraphChoice = Literal[True, False, "auto", "strict"]
KernelChoice = Literal["auto", "off", "eager", "fast"]
LoraChoice = Literal["auto", "merged", "separate", "fused"]
QkvChoice = Literal["auto", "interleaved", "stacked"]
PromptResidency = Literal["auto", "gpu", "cpu", "free"]
SPARSE_DENSE_LAYERS = 2
"""First layers that read the whole window whatever `EngineConfig.attention` is."""
SPARSE_TAU_LIMIT = 8.0
"""No block of a window is further from the mean."""
SPARSE_STEPS = 2
"""First denoise steps of a chunk in which "sparse" reads a part, by default."""
SPARSE_STEPS_LIMIT = 64
SPARSE_BLOCKS = (8, 16, 32, 64)
"""Keys that may share a summary."""
LINEAR_SCHEMES = ("auto", "bf16", "fp8_rowwise", "fp8_mixed", "fp8_block")
"""Schemes of `engine.schemes` by name, or what fits."""
VAE_SPATIAL_FACTOR = 16
FRAMES_PER_LATENT = (1, 4, 4, 4, 4)
"""Pixel frames that the latents of one chunk cover; the pattern repeats every five latents."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """Picture size and the grids that follow from it."""

    height_px: int
    width_px: int

    def __post_init__(self) -> None:
        for name in ("height_px", "width_px"):
            value = getattr(self, name)
            if value < 32 or value % 32:
                raise ConfigError(f"geometry.{name} is {value}; allowed: positive multiples of 32")

    @property
    def latent_height(self) -> int:
        """Latent cells from top to bottom."""
        return self.height_px // VAE_SPATIAL_FACTOR

    @property
    def latent_width(self) -> int:
        """Latent cells from left to right."""
        return self.width_px // VAE_SPATIAL_FACTOR

    @property
    def rows_per_latent(self) -> int:
        """Rows of one latent frame with the 1x2x2 patch."""
        return (self.latent_height // 2) * (self.latent_width // 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerConfig:
    """Few-step sampler: predict the clean chunk, noise it again to the next level."""

    steps: int = 4
    """Denoise steps of a chunk."""
    shift: float = 12.0
    """Shift of the sigma grid; 12 spends nearly all steps at high noise."""
    anchor_t: float = 0.999
    """Model time of the anchor rows (1 is clean)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CameraConfig:
    """How controls move the camera. Speeds are per frame, the only clock that the model has."""

    forward_per_frame: float = 0.07
    strafe_per_frame: float = 0.05
    yaw_deg_per_frame: float = 1.2
    pitch_deg_per_frame: float = 0.4
    smoothing: float = 0.35
    """Share of the gap to the wanted velocity that one frame closes, 0..1."""
    boost_factor: float = 1.5
    """Factor on walking speed while boost is held."""
    pitch_limit_rad: float = 0.25


@dataclass(frozen=True, kw_only=True, slots=True)
class TextConfig:
    """Word encoder: a table of known words, shared buckets for the rest, a fixed row count."""

    vocabulary: tuple[str, ...] = ()
    """Known words, lower case, sorted."""
    unknown_buckets: int = 64
    """Embeddings that words outside the vocabulary share by their hash."""
    rows: int = 8
    """Text rows of the prefix, whatever the length of the prompt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen3VlTextConfig:
    """What a model reads of a Qwen3-VL: the first picture and the prompt, a row a token.

    Source: MiniMax-H3 release, text encoder.
    """

    layer: int = 50
    """Decoder layers that run; their last hidden state is taken before any norm."""
    caption_rows: int = 512
    """Tokens that a prompt may have. Training captions had up to 250; each row costs keys and
    values in every layer."""

    def __post_init__(self) -> None:
        for name in ("layer", "caption_rows"):
            if getattr(self, name) < 1:
                raise ConfigError(f"text.{name} is {getattr(self, name)}; allowed: 1 or more")


LABEL_ROWS = 8
"""Rows around the picture's in a prompt: the six tokens of its label, its start and its end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Everything that the weights fix. The first group uses the names of diffusers' constructor."""

    num_attention_heads: int = 56
    attention_head_dim: int = 128
    hidden_size: int = 5376
    num_layers: int = 50
    num_refiner_layers: int = 2
    ffn_dim: int = 14336
    in_channels: int = 24
    audio_in_channels: int = 32
    patch_size: tuple[int, int, int] = (1, 2, 2)
    text_dim: int = 5120
    freq_dim: int = 256
    time_embed_hidden_dim: int = 5376
    time_embed_dim: int = 2688
    rope_freq_dim: int = 16
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    qk_norm_eps: float = 1e-5
    final_norm_eps: float = 1e-5

    camera_dtype: Literal["attention", "float32"] = "attention"
    """Dtype of the camera matrices: as released they are rounded to the dtype of the attention.
    In bfloat16 that makes steps of 0.06 units at a distance of 8 to 16, which would swallow the
    motion of a small world; "float32" keeps it."""
    latents_per_chunk: int = 5
    window_chunks: int = 6
    """Chunks that attention sees: the current one and the history before it."""
    audio_latent_count: int = 263
    """Audio latents of each stereo channel in the prefix."""
    audio_channel_count: int = 2
    geometry: Geometry = field(default_factory=lambda: Geometry(height_px=768, width_px=1344))
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    camera: CameraConfig = field(default_factory=CameraConfig)
    text: TextConfig | Qwen3VlTextConfig = field(default_factory=TextConfig)
    """Which encoder the prompt goes through, with its settings."""

    def __post_init__(self) -> None:
        if self.patch_size != (1, 2, 2):
            raise ConfigError(f"patch_size is {self.patch_size}; allowed: (1, 2, 2)")
        if self.latents_per_chunk != len(FRAMES_PER_LATENT):
            raise ConfigError(
                f"latents_per_chunk is {self.latents_per_chunk}; allowed: {len(FRAMES_PER_LATENT)}"
            )
        suffix = self.attention_head_dim - 6 * self.rope_freq_dim
        if suffix < 0 or suffix % 4:
            raise ConfigError(
                f"attention_head_dim is {self.attention_head_dim}, rope_freq_dim is "
                f"{self.rope_freq_dim}; allowed: head width minus 6 x rope_freq_dim is a "
                "multiple of 4 and not negative"
            )
        if self.camera_dtype not in ("attention", "float32"):
            raise ConfigError(
                f"camera_dtype is {self.camera_dtype!r}; allowed: 'attention', 'float32'"
            )
        positive = (
            "num_attention_heads", "hidden_size", "num_layers", "ffn_dim", "in_channels",
            "text_dim", "window_chunks", "audio_latent_count", "audio_channel_count",
        )  # fmt: skip
        for name in positive:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; allowed: 1 or more")
        if self.freq_dim % 2:
            raise ConfigError(f"freq_dim is {self.freq_dim}; allowed: even numbers")

    @property
    def attention_dim(self) -> int:
        """Width of all heads together; need not be the hidden size."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def rotary_dim(self) -> int:
        """Leading head channels that carry the rotary embedding; PRoPE has the rest."""
        return 6 * self.rope_freq_dim

    @property
    def patch_features(self) -> int:
        """Features of one video row."""
        return self.in_channels * self.patch_size[1] * self.patch_size[2]

    @property
    def history_chunks(self) -> int:
        """Most chunks that the cache keeps."""
        return self.window_chunks - 1

    @property
    def rows_per_latent(self) -> int:
        """Rows of one latent frame."""
        return self.geometry.rows_per_latent

    @property
    def rows_per_chunk(self) -> int:
        """Rows of one chunk."""
        return self.latents_per_chunk * self.geometry.rows_per_latent

    @property
    def frames_per_chunk(self) -> int:
        """Pixel frames of one chunk."""
        return sum(FRAMES_PER_LATENT)

    @property
    def text_rows(self) -> int:
        """Most text rows of a prefix: what memory is planned for."""
        if isinstance(self.text, TextConfig):
            return self.text.rows
        return LABEL_ROWS + self.rows_per_latent + self.text.caption_rows

    @property
    def audio_rows(self) -> int:
        """Audio rows of the prefix, channel after channel."""
        return self.audio_channel_count * self.audio_latent_count

    def to_json(self) -> str:
        """Text of `config.json`."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, *, where: str = "config.json") -> ModelConfig:
        """Read `config.json` strictly.

        Raises: ConfigError naming the key that is missing, unknown or of a wrong type.
        """
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{where} is not json: {error}") from error
        return read_dataclass(cls, data, where)


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptOptions:
    """Where the prompt encoder of a model that reads a Qwen3-VL is, and what is kept of its work.

    A model with words of its own has no use for any of it.
    """

    encoder: str | None = None
    """Folder with text_encoder, tokenizer and processor. By default the one beside the weights;
    where there is none, kept encodings alone are served."""
    residency: PromptResidency = "auto"
    """Where its weights stay: "gpu"; "cpu", which computes there, too; "free", which reads them for
    each new prompt, layer by layer, and keeps none. "auto": where the engine is."""
    cache: str = "~/.cache/worldstream/prompts"
    """Folder of the encodings that are kept."""
    cache_mib: int = 4096
    """Bound on them; 0 keeps none. One of 1344x768 takes 12 to 16."""
    refinement: bool = False
    """Encode one canonical prompt about looks in place of every prompt. What a world shows then
    comes from its picture alone, and no encoder is needed once its encoding is kept."""

    def __post_init__(self) -> None:
        allowed = typing.get_args(PromptResidency)
        if self.residency not in allowed:
            raise ConfigError(
                f"prompt_residency is {self.residency!r}; allowed: {', '.join(map(repr, allowed))}"
            )
        if self.cache_mib < 0:
            raise ConfigError(f"prompt_cache_mib is {self.cache_mib}; allowed: 0 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """What a run chooses: where and how fast it runs. The maths stays, but for `linear`, for
    `attention` "sparse" and for `prompts.refinement`, which say so.
    """

    device: str = "auto"
    """"auto" (CUDA where present), "cpu", "cuda" or "cuda:N"."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of the transformer blocks. "auto": bfloat16 on CUDA; on a CPU the faster of the two by
    a short measurement. The choice is logged and stored resolved."""
    compile: CompileChoice = "auto"
    """"full" compiles a pass over all blocks, "blocks" the halves of a block around attention; each
    at its first use, and kept on disk. "auto": full on CUDA where there are no fused kernels, which
    leave a compiler nothing to fuse; on a CPU blocks where `is_long_lived`, else off."""
    is_long_lived: bool = False
    """Whether it runs for so long that half a minute of compilation pays: beside a browser on two
    cores a chunk of the small model then takes a tenth less."""
    graphs: GraphChoice = "auto"
    """Record passes as CUDA graphs and replay them. The same bits. "auto": on CUDA. A pass that
    cannot be recorded runs plainly and says so; "strict" raises there, and compares the addresses
    of its inputs with the recorded ones at every copy."""
    attention: AttentionName = "auto"
    """Attention over the window. "auto" measures the backends of this machine once, and keeps the
    choice, because a trace is made again with the same bits only by the same backend. "sparse" is
    an approximation: it reads a part of the window and a summary (`engine.kernels.sparse`)."""
    sparse_tau: float = 1.0
    """Deviations above the mean score at which "sparse" reads a block; larger reads less."""
    sparse_block: int = 64
    """Keys that share a summary in "sparse", one of `SPARSE_BLOCKS`. What counts is their share of
    a picture: 64 are a sixth of one at 832x480, whose latents have 390 rows, but one and a half of
    the small world's, which have 40. So the small world is judged at 8, a fifth of a picture."""
    sparse_steps: int = SPARSE_STEPS
    """Denoise steps, the first of each chunk, in which "sparse" reads a part. The later ones and
    the refresh, whose keys and values stay for long, read everything."""
    kernels: KernelChoice = "auto"
    """Fused kernels: "eager" rounds where the plain path rounds, "fast" once at each store. "auto":
    fast on CUDA unless something is compiled by name."""
    linear: str = "auto"
    """Products of the blocks: "bf16" in the dtype of the blocks, "fp8_rowwise" in 8 bits with a
    scale a row, which is an approximation, "fp8_block" with one for each 128 channels, "fp8_mixed"
    with each where it tells and attention's output as it is; or a json file of one's own
    (`schemes.read_scheme`).
    "auto": "bf16" wherever that fits, else "fp8_mixed" where the device has it and that fits, else
    "fp8_rowwise"; see `memory.choose_plan`."""
    lora: str | None = None
    """An adapter: a file, or the folder that training left it in."""
    lora_mode: LoraChoice = "auto"
    """How it is used, see `engine.lora`. "auto": merged into linears in eight bits, where that
    loses nothing; fused where kernels can; else separate."""
    qkv_layout: QkvChoice = "auto"
    """Order of fused projections in weights of the original layout, which no file tells: "auto"
    takes several files, or an index, for official shards (interleaved per head) and one file for
    a re-packed one (stacked)."""
    free_adaln: bool | Literal["auto"] = "auto"
    """Give the modulation weights up once their tables are built: 26 GB of the large model. The
    third that a new session's audio time needs moves to the machine's memory. "auto": where it
    would not fit else."""
    audio_vae: str | None = None
    """Folder of the audio autoencoder, through which silence passes once, or the file that was kept
    of it (`engine.silence`). None stands for the mean of all audio latents."""
    prefix_cache: bool = True
    """Compute the prefix once per session and prompt instead of in every forward. Exact."""
    adaln_tables: bool = True
    """Keep the modulation of the fixed times instead of recomputing it. Exact."""
    packed_history: bool = True
    """Keep history keys and values ready for attention, packed once per refresh. Exact."""
    prompts: PromptOptions = field(default_factory=PromptOptions)
    """Of a model whose prompts go through an encoder with weights of its own."""

    def __post_init__(self) -> None:
        kind, _, index = self.device.partition(":")
        if kind not in ("auto", "cpu", "cuda") or (index and not index.isdecimal()):
            raise ConfigError(
                f"device is {self.device!r}; allowed: 'auto', 'cpu', 'cuda', 'cuda:N'"
            )
        for name, choices in (
            ("compile", CompileChoice), ("attention", AttentionName), ("kernels", KernelChoice),
            ("graphs", GraphChoice), ("free_adaln", Literal[True, False, "auto"]),
            ("qkv_layout", QkvChoice), ("lora_mode", LoraChoice),
            ("dtype", Literal["auto", "float32", "bfloat16"]),
        ):  # fmt: skip
            value, allowed = getattr(self, name), typing.get_args(choices)
            if value not in allowed:
                raise ConfigError(f"{name} is {value!r}; allowed: {', '.join(map(repr, allowed))}")
        if self.linear not in LINEAR_SCHEMES and not self.linear.endswith(".json"):
            names = ", ".join(map(repr, LINEAR_SCHEMES))
            raise ConfigError(f"linear is {self.linear!r}; allowed: {names}, a json file")
        least, most = -SPARSE_TAU_LIMIT, SPARSE_TAU_LIMIT
        if not least <= self.sparse_tau <= most:
            raise ConfigError(f"sparse_tau is {self.sparse_tau}; allowed: {least} to {most}")
        if self.sparse_block not in SPARSE_BLOCKS:
            blocks = ", ".join(map(str, SPARSE_BLOCKS))
            raise ConfigError(f"sparse_block is {self.sparse_block}; allowed: {blocks}")
        if self.sparse_steps not in range(1, SPARSE_STEPS_LIMIT + 1):
            bound = f"1 to {SPARSE_STEPS_LIMIT}, of those of the model"
            raise ConfigError(f"sparse_steps is {self.sparse_steps}; allowed: {bound}")
        if self.attention != "sparse":
            # Said for nothing, it would look as if it had been heard.
            for name in ("sparse_tau", "sparse_block", "sparse_steps"):
                value, default = getattr(self, name), type(self).__dataclass_fields__[name].default
                if value != default:
                    raise ConfigError(
                        f"{name} is {value} with attention {self.attention!r}; allowed: "
                        f"{default}, or attention 'sparse'"
                    )
        if self.kernels in ("eager", "fast") and self.compile == "blocks":
            raise ConfigError(
                f"kernels is {self.kernels!r}; allowed with compile 'blocks': 'off', because both "
                "are forms of the halves of a block"
            )
        if not self.has_shortcuts:
            for name, is_asked in (
                ("compile", self.compile == "full"), ("graphs", self.records_passes),
                ("kernels", self.kernels in ("eager", "fast")),
                ("free_adaln", self.free_adaln is True),
            ):  # fmt: skip
                if is_asked:
                    raise ConfigError(
                        f"{name} is {getattr(self, name)!r}; allowed with prefix_cache, "
                        "adaln_tables and packed_history alone, whose passes it speeds up"
                    )

    @property
    def has_shortcuts(self) -> bool:
        """Whether a pass is over the chunk's rows alone, with everything else at hand."""
        return self.prefix_cache and self.adaln_tables and self.packed_history

    @property
    def records_passes(self) -> bool:
        """Whether graphs are asked for by name, or resolved to be."""
        return self.graphs in (True, "strict")


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """A named model: its configuration, where its weights lie, and the picture sizes it knows."""

    name: str
    model: ModelConfig
    weights: Path | None
    """Folder of the weights that ship with the project; None where none do."""
    geometries: tuple[Geometry, ...]
    codec: Literal["tiny", "h3"] = "tiny"
    """What makes pictures of latents, where it is to be random as the model is."""


def preset(name: str, geometry: Geometry | None = None) -> Preset:
    """Preset by name, optionally at another picture size.

    The word list of `mini` comes with its weights; here it is empty. `tiny` is for tests and always
    random.

    Raises: ConfigError for an unknown name.
    """
    if name == "mini":
        model = ModelConfig(
            num_attention_heads=6, attention_head_dim=64, hidden_size=384, num_layers=10,
            num_refiner_layers=1, ffn_dim=1024, text_dim=64, freq_dim=256,
            time_embed_hidden_dim=384, time_embed_dim=64, rope_freq_dim=8,
            camera_dtype="float32", audio_latent_count=1,
            geometry=Geometry(height_px=160, width_px=256),
        )  # fmt: skip
        weights = Path(__file__).resolve().parent.parent / "miniworld" / "weights"
        found = Preset(name=name, model=model, weights=weights, geometries=(model.geometry,))
    elif name == "h3_33b":
        # Walking and turning speeds of published runs: 0.05 m and 0.53 degrees a latent.
        camera = CameraConfig(
            forward_per_frame=0.0147, strafe_per_frame=0.0147, yaw_deg_per_frame=0.157,
            pitch_deg_per_frame=0.08, boost_factor=3.0, pitch_limit_rad=0.6,
        )  # fmt: skip
        model = ModelConfig(camera=camera, text=Qwen3VlTextConfig())
        sizes = (model.geometry, Geometry(height_px=480, width_px=832))
        found = Preset(name=name, model=model, weights=None, geometries=sizes, codec="h3")
    elif name == "tiny":
        model = ModelConfig(
            num_attention_heads=2, attention_head_dim=128, hidden_size=96, num_layers=3,
            num_refiner_layers=1, ffn_dim=160, text_dim=64, freq_dim=32,
            time_embed_hidden_dim=64, time_embed_dim=48, audio_latent_count=11,
            geometry=Geometry(height_px=64, width_px=96),
        )  # fmt: skip
        found = Preset(name=name, model=model, weights=None, geometries=(model.geometry,))
    else:
        raise ConfigError(f"preset is {name!r}; allowed: {', '.join(PRESET_NAMES)}")
    if geometry is None:
        return found
    return dataclasses.replace(found, model=dataclasses.replace(found.model, geometry=geometry))
