"""Webhooks: operators' receivers are notified when a stored answer or a batch ends. Standard Webhooks 1.0.0.

`announcer.py` is the interface to the rest of the gateway. `outbox.py` stores deliveries in Redis. `sender.py` takes
and sends them. `retries.py` decides what follows an attempt. `post.py` and `network.py` make one. `addresses.py`
decides which addresses it may reach.
"""
