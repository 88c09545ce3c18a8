"""Ways to run the same tensor code faster.

Owns: compilation of modules under named modes.
Does not own: models, their shapes, their weights; it knows torch only.
"""
