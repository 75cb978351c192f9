"""Layers with a recurrent state instead of keys and values: convolutions, linear attention, Mamba."""
