"""A batch straight on the queue, without a gateway; what it shares with batches over HTTP is `headrace_gateway.batch`.

run_file       the secret that the ids of a run's requests are made from, kept until the run is complete
batch_run      from the input to the output and the file of errors
"""
