"""The runner of device cuda: CUDA graphs, sampling on the device, steps that are launched ahead."""
