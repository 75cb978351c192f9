"""The endpoints about models: the list of models, and calls of their tokenizers, which the workers answer."""
