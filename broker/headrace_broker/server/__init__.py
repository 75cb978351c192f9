"""Connections to Redis or Valkey: URLs, Sentinels, checks of the server's settings, and a temporary server.

The keys of the queue are in `keys.py`, one folder up.
"""
