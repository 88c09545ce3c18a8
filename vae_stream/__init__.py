"""Latents to pixels and a first image to its latent, one latent frame at a time.

Owns: the frame geometry, the tiny causal VAE, its streaming state, pixel ranges and layouts.
Does not own: latents' origin (`engine`), queues, video encoding and sessions (`stream`).
"""

from vae_stream.decoder import DecoderState, FrameChunk, StreamingDecoder
from vae_stream.encoder import ImageEncoder
from vae_stream.taehv import TinyVae, TinyVaeConfig

__all__ = [
    "DecoderState",
    "FrameChunk",
    "ImageEncoder",
    "StreamingDecoder",
    "TinyVae",
    "TinyVaeConfig",
]
