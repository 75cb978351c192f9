"""Files over HTTP: uploads for batches, and the output of batches.

stored_files     the directory, which all replicas share: one folder per API key
upload           parses a multipart body and writes its file to disk as it arrives
endpoints        `/v1/files`
"""
