"""The queue: leases, the transport of workers, dead letters and counts.

Producers send with stock Celery; of this package they use only the counts and the dead letters.
"""
