"""The options of an engine, the engines that can be chosen, and what each of them can do.

Parameters of one request are in `requests`.
"""
