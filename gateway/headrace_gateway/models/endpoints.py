"""`GET /v1/models`: the values that `model` may have, adapters included."""

from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace_broker import LoadingModel, RegisteredModel
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
    key, catalog = key_of(request), gateway_of(request).models
    models, loading = await catalog.known()
    listed = []
    for name in sorted({*models, *loading}):
        progress = _progress(loading.get(name))
        if name not in models:
            listed.append({**_shape(name, None, loading[name].since), **progress})
            continue
        for served, parent in ((name, None), *((lora, name) for lora in models[name].loras)):
            listed.append({**_shape(served, parent, models[name].created), **_properties(models[name]), **progress})
    return [model for model in listed if key.may_use(model["id"])]


def _shape(name: str, parent: str | None, created: float) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": int(created),
        "owned_by": "headrace",
        "root": name,
        "parent": parent,
        "permission": [],
    }


def _properties(model: RegisteredModel) -> dict[str, Any]:
    """Return what is known once a worker has loaded the model."""
    properties = {"max_model_len": model.max_model_len, "tasks": [*model.tasks]}
    return properties if model.dimensions is None else {**properties, "dimensions": model.dimensions}


def _progress(loading: LoadingModel | None) -> dict[str, Any]:
    return {} if loading is None else {"state": "loading", "progress": round(loading.progress, 3)}


routes: Final = [
    Route("/v1/models", list_models, methods=["GET"]),
    Route("/v1/models/{id:path}", find_model, methods=["GET"]),
]
