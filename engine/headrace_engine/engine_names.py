"""The name of Headrace's own engine. Other engines have the names of their entry points, see `engines.py`."""

from typing import Final

OWN_ENGINE: Final = "headrace"
