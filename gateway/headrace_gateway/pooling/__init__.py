"""The APIs of models that compute one row of numbers for each input: embeddings, rerank, score, classify.

`call.py` is what all of them share, and `answering.py` sends a call and waits for its rows. Each other file has one
API: how its bodies are read and its answers written.
"""
