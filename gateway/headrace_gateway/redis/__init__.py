"""What all replicas share in Redis: the keys, the Lua scripts, claims of work, and cached reads.

What is stored under the keys is in the folder that uses it.
"""
