"""The APIs of models that compute one row of numbers for each input: embeddings, rerank, score, classify.

All of them share `pooling_body.py`, and `answering.py`, which sends a call and waits for its rows. Each other file has
one API: how its bodies are read and its answers written.
"""
