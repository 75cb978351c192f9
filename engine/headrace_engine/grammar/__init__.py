"""Structured outputs: grammars, their sources and their checks. `core.grammars` computes the masks of requests."""
