"""Paged attention: the interface of a backend, and its implementations."""
