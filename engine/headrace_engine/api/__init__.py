"""The engine as a library: `LLM` and `AsyncLLMEngine`, the checks of requests, and the conversion of outputs.

The core itself is in `core`. Conversion between text and tokens is in `text`.
"""
