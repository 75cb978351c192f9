"""Webhooks: operators' receivers are told when a stored answer or a batch ends. Standard Webhooks 1.0.0.

`announcer.py` is what the rest of the gateway calls. `outbox.py` keeps deliveries in Redis, `sender.py` takes and sends
them, `retries.py` says what an attempt means, `post.py` and `network.py` make one, `addresses.py` says whom it reaches.
"""
