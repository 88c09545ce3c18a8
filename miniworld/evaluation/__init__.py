"""Quality of the mini world, measured against its renderer.

Owns: measures of frames, estimators of motion, held-out cases, the items of the quality table.
Does not own: sampling (`engine`), decoding (`vae_stream`), the truth (`miniworld.render`).
"""
