"""`POST /v1/decisions`: OpenAI's API for questions about one input, answered by a model that generates.

It shares the endpoint of the pooling APIs, whose answers are sent whole too.
"""
