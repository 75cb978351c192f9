"""Structured outputs: grammars, their sources and their checks. A request's own masks are made in `core`."""
