"""A Redis server, workers and gateways as processes on this machine: `headrace serve`, the demo, the benchmarks."""
