"""The causal ViT decoder: windows in space, a ring of keys and values in time.

Owns: windows and clock, modes, state, calls in plain torch and in kernels.
Does not own: the network and its released layouts (`vae_stream.vit`), what all decoders have in
common (`vae_stream.decoder`), recording of passes (`graphs`).
Source: StreamRender-H3 (github.com/NVlabs/Sana).
"""

from vae_stream.causal_vit.decoder import CausalVitDecoder, Form
from vae_stream.causal_vit.modes import Mode
from vae_stream.causal_vit.places import CausalConfig

__all__ = ["CausalConfig", "CausalVitDecoder", "Form", "Mode"]
