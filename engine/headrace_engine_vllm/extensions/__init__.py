"""Code that runs inside vLLM: a scheduler that can resume requests, extensions of its ranks, and step statistics."""
