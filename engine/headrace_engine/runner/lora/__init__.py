"""LoRA adapters: reading them, and applying them to the rows of their requests."""
