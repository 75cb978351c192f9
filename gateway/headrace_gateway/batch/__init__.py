"""Batches: files of requests, answered through the queue at the lowest priority.

Shared with `headrace batch run`, which needs no gateway:

input_file     the lines of the input, read again as often as needed, a few in memory at a time
validation     checks every line before the first one is sent
line_request   sends one line, or attaches to its request if it was sent before, and reads the answer
window         limits the lines in the queue, and shares them fairly among batches
answer_file    a file of answers that holds complete lines only

Batches over HTTP, which survive the loss of any replica:

record         a batch and its object over HTTP
store          batches in Redis; a replica writes to a batch only while it holds the claim
segments       the answers that one claim has written, and how many of their bytes are committed
work           runs one batch from its validation to its files
runner         claims batches, renews the claims, and hands batches over
endpoints      `/v1/batches`
"""
