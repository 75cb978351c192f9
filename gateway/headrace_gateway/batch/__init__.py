"""Batches: files of requests, answered through the queue at the last priority.

Shared with `headrace batch run`, which needs no gateway:

input_file     the lines of the input, read as often as wanted, a few in memory at a time
validation     every line checked before the first is sent
line_request   one line: sent, or joined where it was sent before, and read to its answer
window         a bounded number of lines in the queue at a time, shared fairly among batches
answer_file    a file of answers: whole lines only

Batches over HTTP, which outlive every replica:

batch_record   what a batch is, and how it looks over HTTP
batch_store    batches in Redis; a replica writes to a batch only while it holds the claim
segments       the answers that one claim has written, and which of their bytes count
batch_work     one batch in this replica's hands, from its validation to its files
batch_runner   takes batches, keeps them, and lets others have them
batches_endpoint   `/v1/batches`
"""
