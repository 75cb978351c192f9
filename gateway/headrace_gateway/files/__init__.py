"""Files over HTTP: uploads for batches, and what batches have written.

stored_files     the directory, which all replicas share: one folder for each API key
upload           a multipart body, read as it comes and written to the disk
files_endpoint   `/v1/files`
"""
