"""A request's stream: its entries, its writer and its readers. The messages of the queue are in `queue`."""
