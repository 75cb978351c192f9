"""`GET /v1/organization/usage/...`: the tokens that were used, for an admin key."""

import asyncio
from collections import defaultdict
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace_broker.usage.entry import UsageKind
from headrace_broker.usage.ledger import UsageCounts, Usages
from headrace_gateway.context import gateway_of, require_admin
from headrace_gateway.http.json import JsonResponse
from headrace_gateway.usage.query import GROUPS, UsageQuery


async def completions(request: Request) -> Response:
    """Return the usage of requests that generate, and of decisions."""
    return await _usage(request, "completions")


async def embeddings(request: Request) -> Response:
    """Return the usage of embeddings, rerank, score and classify."""
    return await _usage(request, "embeddings")


async def _usage(request: Request, kind: UsageKind) -> Response:
    require_admin(request, "the usage of an organization")
    query = UsageQuery.read(request.query_params)
    starts = query.starts
    found: Usages = {}
    if starts:
        found = await gateway_of(request).client.usage(query.width, starts[0], starts[-1] + query.width)
    buckets = await asyncio.to_thread(buckets_of, query, kind, found)
    next_page = query.next_page
    return JsonResponse({"object": "page", "data": buckets, "has_more": next_page is not None, "next_page": next_page})


def buckets_of(query: UsageQuery, kind: UsageKind, found: Usages) -> list[dict[str, Any]]:
    """Return the buckets of a page. Takes seconds for many rows, so a thread calls it."""
    sums: dict[int, defaultdict[tuple[str | None, ...], UsageCounts]]
    sums = {start: defaultdict(UsageCounts) for start in query.starts}
    for group, counts in found.items():
        if group.kind == kind and query.selects(group):
            names, of_bucket = query.names_of(group), sums[group.start]
            of_bucket[names] = of_bucket[names].plus(counts)
    return [
        {
            "object": "bucket",
            "start_time": start,
            "end_time": start + query.width,
            "results": [_result(kind, names, counts) for names, counts in sorted(of_bucket.items(), key=_order)],
        }
        for start, of_bucket in sums.items()
    ]


def _order(item: tuple[tuple[str | None, ...], UsageCounts]) -> list[str]:
    return [name or "" for name in item[0]]


def _result(kind: UsageKind, names: tuple[str | None, ...], counts: UsageCounts) -> dict[str, Any]:
    result = {
        "object": f"organization.usage.{kind}.result",
        "input_tokens": counts.prompt_tokens,
        "num_model_requests": counts.requests,
        **dict(zip(GROUPS, names, strict=True)),
    }
    if kind == "completions":
        result |= {
            "output_tokens": counts.completion_tokens,
            "input_cached_tokens": counts.cached_tokens,
            "input_audio_tokens": 0,
            "output_audio_tokens": 0,
            "batch": None,
            "service_tier": None,
        }
    return result


routes: Final = [
    Route("/v1/organization/usage/completions", completions),
    Route("/v1/organization/usage/embeddings", embeddings),
]
