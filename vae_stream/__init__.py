"""Latents to pixels and a first image to its latent, one latent frame at a time.

Owns: frame geometry, decoders and encoders, their streaming state, pixel ranges and layouts.
Does not own: latents' origin (`engine`), queues, video encoding and sessions (`stream`).
"""

from vae_stream.decoder import DecoderSnapshot, DecoderState, FrameChunk, StreamingDecoder
from vae_stream.encoder import ImageEncoder, open_encoder
from vae_stream.opening import open_decoder
from vae_stream.taehv import TinyVae, TinyVaeConfig
from vae_stream.tiny_decoder import TinyDecoder

__all__ = [
    "DecoderSnapshot",
    "DecoderState",
    "FrameChunk",
    "ImageEncoder",
    "StreamingDecoder",
    "TinyDecoder",
    "TinyVae",
    "TinyVaeConfig",
    "open_decoder",
    "open_encoder",
]
