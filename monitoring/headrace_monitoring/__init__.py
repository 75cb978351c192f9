"""Metrics, health endpoints, logs and dashboards. Imports no other package of Headrace."""
