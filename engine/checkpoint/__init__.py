"""Weights on disk.

Owns: safetensors files and their headers, the layouts of the transformer, the plan of what fills
what, reading onto a device, the folder with its configuration and hash, the keys of adapters.
Does not own: what is done with an adapter (`engine.lora`), quantisation (`engine.quant`).
"""
