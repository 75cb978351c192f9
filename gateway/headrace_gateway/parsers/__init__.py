"""Parsers that find tool calls and reasoning in a model's text. They do no I/O. Text may arrive in any pieces."""
