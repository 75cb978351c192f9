"""Models: loading a checkpoint, inspecting its layers, and computing its steps on paged K/V memory."""
