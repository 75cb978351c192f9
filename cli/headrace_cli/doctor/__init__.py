"""What `headrace doctor` checks: Redis, this machine and the model. Each check yields findings; none raises."""
