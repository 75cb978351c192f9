"""`python -m headrace_gateway.openapi write`: write docs/openapi.json."""

import sys

from headrace_gateway.openapi.document import PATH, text

if sys.argv[1:] != ["write"]:
    sys.exit("usage: python -m headrace_gateway.openapi write")
PATH.write_text(text(), encoding="utf-8")
