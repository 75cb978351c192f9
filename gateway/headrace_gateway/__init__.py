"""The HTTP gateway of Headrace: OpenAI's API on the queue, with streams that any replica can continue.

    from headrace_gateway import GatewaySettings, make_app

    app = make_app(GatewaySettings(redis_url="redis://127.0.0.1:6379/0"))  # an ASGI application

It puts requests into the queue and reads their streams from Redis. It knows no engine and no worker.
"""

from headrace_gateway.app import make_app
from headrace_gateway.errors import ApiError, GatewaySettingsError, HeadraceGatewayError
from headrace_gateway.settings import GatewaySettings

__all__ = ["ApiError", "GatewaySettings", "GatewaySettingsError", "HeadraceGatewayError", "make_app"]
