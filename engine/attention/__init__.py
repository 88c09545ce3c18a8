"""Attention over the window of a rollout.

Owns: which rows see which, where rows sit (RoPE, PRoPE), the backends of the product itself.
Does not own: the projections (`engine.model`), the cached tensors (`engine.kv_cache`).
"""
