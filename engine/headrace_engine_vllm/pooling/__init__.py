"""Models that embed, score or classify on vLLM."""
