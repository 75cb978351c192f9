"""Webhooks: operators' receivers are notified when a stored answer or a batch ends. Standard Webhooks 1.0.0.

`event_publisher.py` is the interface to the rest of the gateway. `outbox.py` stores deliveries in Redis, and decides
when a failed one is tried again. `sender.py` takes and sends them. `post.py` makes one attempt, and `network.py`
decides which addresses it may reach.
"""
