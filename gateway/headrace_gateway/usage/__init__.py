"""The usage API: the tokens that were used, in OpenAI's shape."""
