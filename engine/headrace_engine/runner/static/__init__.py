"""The runner of devices that compile a graph for each shape: Neuron, and static-cpu to check it."""
