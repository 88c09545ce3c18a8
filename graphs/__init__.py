"""Ways to run the same tensor code faster.

Owns: compilation of modules under named modes, recording and replay of passes.
Does not own: models, their shapes, their weights; it knows torch only.
"""
