"""Linear layers: layouts of their weights, and the replacement of a model's own layers."""
