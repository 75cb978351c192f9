"""The way out that all APIs share: the stored envelope, the reader of a request's streams, and server-sent events.

Each API's own chunks are made by the `stream.py` of its folder.
"""
