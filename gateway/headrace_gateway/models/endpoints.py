"""`GET /v1/models`: the values that `model` may have, adapters included."""

from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace_broker import RegisteredModel
from headrace_gateway.context import gateway_of, key_of
from headrace_gateway.http.broker_errors import unknown_model
from headrace_gateway.http.json import JsonResponse


async def list_models(request: Request) -> Response:
    """`GET /v1/models`."""
    return JsonResponse({"object": "list", "data": await _listed(request)})


async def find_model(request: Request) -> Response:
    """`GET /v1/models/{id}`. A model's id may contain slashes."""
    wanted = request.path_params["id"]
    for model in await _listed(request):
        if model["id"] == wanted:
            return JsonResponse(model)
    raise unknown_model(wanted)


async def _listed(request: Request) -> list[dict[str, Any]]:
    key = key_of(request)
    models = await gateway_of(request).models.all()
    listed = []
    for name in sorted(models):
        listed.append(_shape(models[name], name, None))
        listed += [_shape(models[name], lora, name) for lora in models[name].loras]
    return [model for model in listed if key.may_use(model["id"])]


def _shape(model: RegisteredModel, name: str, parent: str | None) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": int(model.created),
        "owned_by": "headrace",
        "root": name,
        "parent": parent,
        "max_model_len": model.max_model_len,
        "tasks": [*model.tasks],
        **({} if model.dimensions is None else {"dimensions": model.dimensions}),
        "permission": [],
    }


routes: Final = [
    Route("/v1/models", list_models, methods=["GET"]),
    Route("/v1/models/{id:path}", find_model, methods=["GET"]),
]
