"""Linear layers: the forms in which a weight is kept, and what replaces a model's own layers."""
