"""Requests from their claim to their acknowledgement: admission, execution, streams and settlement."""
