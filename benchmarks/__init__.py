"""Measurements and their records.

Owns: benchmark scenarios, their records (JSON lines), the scripts that need a GPU.
Does not own: anything that a command needs at run time.
"""
