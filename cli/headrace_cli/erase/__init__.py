"""Finds and removes what is stored of a tenant."""
