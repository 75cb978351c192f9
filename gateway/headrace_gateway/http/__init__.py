"""HTTP as all endpoints need it: the protocol, JSON answers, errors, the request log and the probes.

Nothing here knows an endpoint's body or the state of a gateway.
"""
