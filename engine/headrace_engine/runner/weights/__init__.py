"""Readers of quantised checkpoints in safetensors files, one for each kind."""
