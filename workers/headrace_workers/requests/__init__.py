"""Requests from their claim to their acknowledgement: what is admitted, runs, is written to streams, and ends."""
