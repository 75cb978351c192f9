"""The queue: leases, the transport of workers, dead letters and counts.

Producers send with stock Celery. Our clients use the counts, the dead letters, the search and the purge of this
package.
"""
