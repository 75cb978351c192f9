"""The HTTP gateway of Headrace: OpenAI's API on the queue. Any replica can resume a stream.

    from headrace_gateway import GatewaySettings, make_app

    app = make_app(GatewaySettings(redis_url="redis://127.0.0.1:6379/0"))  # an ASGI application

It submits requests to the queue and reads their streams from Redis. It imports no engine and no worker.
"""

from headrace_gateway.app import make_app
from headrace_gateway.errors import ApiError, GatewaySettingsError, HeadraceGatewayError
from headrace_gateway.settings import GatewaySettings

__all__ = ["ApiError", "GatewaySettings", "GatewaySettingsError", "HeadraceGatewayError", "make_app"]
