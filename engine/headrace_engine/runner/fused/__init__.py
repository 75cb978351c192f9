"""Decoder layers in as few passes over memory as possible, where they are of the common kind."""
