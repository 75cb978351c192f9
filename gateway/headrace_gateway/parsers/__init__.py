"""Parsers that find tool calls and reasoning in a model's text. They are pure. Text may arrive in any pieces."""
