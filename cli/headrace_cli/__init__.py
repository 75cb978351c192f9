"""The command `headrace`, the demo, the exporter, and services on this machine: the only package that knows all others.

A module imports only what it needs, so that clients need no torch.
"""
