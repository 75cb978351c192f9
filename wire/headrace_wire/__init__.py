"""What a request is: its fields and their rules. The engine, the queue and the gateway use these.

A rule refuses wrong values and describes the right ones as a JSON Schema, so errors and the OpenAPI document agree.
"""
