"""Training stages of the small world.

Owns: one module a stage (data on the fly, loss, optimiser, checkpoint, log) and the optimisers.
Does not own: the networks (`engine`, `vae_stream`), the world (`miniworld.scene`, `.render`).
"""
