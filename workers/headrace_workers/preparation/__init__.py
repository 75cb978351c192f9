"""Prepares a received message: it is read, checked, rendered and tokenised, on the event loop or in another process.

Nothing here writes a stream or knows the running requests.
"""
