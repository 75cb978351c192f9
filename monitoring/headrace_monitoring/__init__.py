"""What an operator sees of Headrace: metrics, health, logs, the dashboard. Knows no other part of Headrace."""
