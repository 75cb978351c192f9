"""Anthropic's Messages API. The format of its errors is in `http`, with that of all other errors."""
