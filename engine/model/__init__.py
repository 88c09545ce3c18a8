"""The diffusion transformer and the two position encodings that it uses.

Owns: the maths of one forward pass. Does not own: caches, windows, sampling.
"""
