"""What all replicas share in Redis: the keys, the Lua scripts, claims of work, and cached reads.

The folder that uses a key defines the format of its value.
"""
