"""The world model: action in, latents out.

Owns: configuration and weights of the transformer, the camera, the prefix, the window cache, the
sampler, the rollout.
Does not own: pixels (`vae_stream`), transport and clocks (`stream`), data and training
(`miniworld`).
"""
