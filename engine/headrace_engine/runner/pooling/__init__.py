"""Models that compute one row of numbers a text: embeddings, scores and class probabilities."""
