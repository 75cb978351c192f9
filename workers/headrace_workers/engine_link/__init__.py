"""The worker's side of its engine process, and the adapters that it loads. Nothing here knows a message or a stream."""
