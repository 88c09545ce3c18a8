"""The commands and the session behind them.

Owns: the command line, sessions (engine + decoder), key scripts, seed images, videos, traces.
Does not own: numerics of the model or the decoder, the small world's scenes and training.
"""
