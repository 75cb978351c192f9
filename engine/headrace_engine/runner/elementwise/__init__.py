"""Norms, rotary positions, gated activations and other kernels that compute each row on its own."""
