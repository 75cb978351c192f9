"""The runner of devices that compile a graph for each shape (neuron, xla), and of static-cpu, which tests it."""
