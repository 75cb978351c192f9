"""What all APIs share to write answers: the stored envelope, the reader of a request's streams, server-sent events.

The `stream.py` in the folder of each API makes the chunks of that API.
"""
