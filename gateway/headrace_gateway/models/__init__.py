"""The endpoints about models: which there are, and calls of their tokenizers, which the workers answer."""
