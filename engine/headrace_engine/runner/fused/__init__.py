"""Fused decoder layers: fewer passes over memory for models with layers like Llama's."""
