"""Compiled C kernels: how they are built and loaded, and the headers that several of them share."""
