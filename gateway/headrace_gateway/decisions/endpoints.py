"""`POST /v1/decisions`."""

from typing import Final

from headrace_gateway.decisions.fields import DECISIONS
from headrace_gateway.pooling.endpoints import routes_of

routes: Final = routes_of(DECISIONS, "/v1/decisions")
