"""Fused decoder layers: fewer passes over memory for models whose layers are of the common kind."""
