"""Parsers that find tool calls and reasoning in a model's text: pure, fed piece by piece, whatever the pieces are."""
