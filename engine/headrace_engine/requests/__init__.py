"""One request and its outputs: parameters, checks of their values, and plain data. Nothing here depends on a model."""
