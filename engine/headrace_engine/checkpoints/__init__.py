"""Finds, identifies and converts the files of a model. The weights are loaded by `runner`."""
