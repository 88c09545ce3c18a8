"""Prompts of a model that reads a Qwen3-VL.

Owns: the files of a Qwen3-VL, the row of tokens that shows it a picture and a prompt, the layers of
it that run, encodings that are kept on disk. Does not own: the interface of all prompt encoders
(`engine.text`), what a model does with the rows (`engine.prefix`). transformers is imported where a
model or its tokenizer is opened, and nowhere else.
"""
