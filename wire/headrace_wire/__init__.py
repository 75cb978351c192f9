"""What a request is: its fields and their rules. The engine, the queue and the gateway use these.

A rule refuses a value and describes it as a JSON Schema, so errors and the OpenAPI document cannot differ.
"""
