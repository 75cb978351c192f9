"""The clients of producers and subscribers, and what they send. Workers import only `tracing` and `tokenizer_calls`."""
