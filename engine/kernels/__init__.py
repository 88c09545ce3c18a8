"""Fused operators.

Owns: kernels, each beside its plain form.
Does not own: when they run; the rest of `engine` decides that.
"""
