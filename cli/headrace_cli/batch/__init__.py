"""A batch straight on the queue, without a gateway. Batches over HTTP share the code in `headrace_gateway.batch`.

`batch_run` reads the input and writes the output and the error file. Its `RunFile` keeps the secret from which the
request ids of a run are derived, until the run is complete.
"""
