"""A batch straight on the queue: its input, its output, and the requests between them. No gateway is needed.

input_file     the lines of the input, read as often as wanted, one in memory at a time
validation     every line checked before the first is sent
answer_file    a file of answers: whole lines only, and which lines it has already
run_file       the secret that the ids of a run's requests are made from, kept until the run is complete
line_request   one line: sent, or joined where it was sent before, and read to its answer
batch_run      a window of lines in the queue at a time
"""
