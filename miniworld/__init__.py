"""The small world that ships with the engine: ray-caster, data, training, evaluation.

Owns: procedural scenes, their renderer, prompts, and everything trained on them.
Does not own: the transformer (`engine`), the decoder's state machine (`vae_stream`), sessions.
"""
