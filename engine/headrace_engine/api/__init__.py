"""The engine as a library: `LLM`, `AsyncLLMEngine`, and the way of a request into the core and of its outputs back.

The core itself is in `core`; the text of prompts and outputs is in `text`.
"""
