"""The way in that all APIs share: headers, bodies, fields and their problems, and `Call`, the checked request.

Each API's own fields are in its folder.
"""
