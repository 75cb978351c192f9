"""A batch straight on the queue, without a gateway. Batches over HTTP share the code in `headrace_gateway.batch`.

run_file       the secret from which the request ids of a run are derived, kept until the run is complete
batch_run      reads the input, and writes the output and the error file
"""
