"""The demo, its steady load and its statistics. `commands/demo.py` draws it."""
