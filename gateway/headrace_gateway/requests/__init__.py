"""What all APIs share to read requests: headers, bodies, fields and their problems, and `Call`, the checked request.

Each API's own fields are in its folder.
"""
