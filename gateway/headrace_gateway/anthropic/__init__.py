"""Anthropic's Messages API. Its errors are in `http`, where every error becomes an answer."""
