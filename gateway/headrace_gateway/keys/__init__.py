"""API keys, their file, authentication, and what a key may use: models, requests, tokens, bytes in Redis."""
