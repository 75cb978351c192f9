"""Enqueue a request, stream its tokens, show what was stored. It imports nothing of Headrace."""

import json
import re

import msgpack
import redis.asyncio
from django.conf import settings
from django.http import HttpResponse, JsonResponse, StreamingHttpResponse
from django.shortcuts import get_object_or_404
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_GET, require_POST

from .celery import app
from .models import Answer
from .tasks import fail, store


@csrf_exempt  # for the example's sake: leave the check on where browsers have a session
@require_POST
def ask(request):
    answer = Answer.objects.create(question=request.POST["question"])
    app.send_task(
        "headrace.generate",
        task_id=str(answer.id),
        kwargs={
            "messages": [{"role": "user", "content": answer.question}],
            "sampling_params": {"max_tokens": 64},
        },
        queue=settings.HEADRACE_QUEUE,
        expires=600,  # seconds
        link=store.s(),
        link_error=fail.s(),
        ignore_result=True,  # or this process would subscribe to each result; `store` gets it
        argsrepr="",
        kwargsrepr="",  # or Celery puts a readable copy of the question into headers and events
    )
    return JsonResponse({"id": str(answer.id)}, status=202)


@require_GET
def show(request, answer_id):
    answer = get_object_or_404(Answer, pk=answer_id)
    return JsonResponse({"state": answer.state, "text": answer.text})


async def stream(request, answer_id):
    """Send the tokens as server-sent events. A browser's EventSource reconnects with the id of its last event."""
    last_id = request.headers.get("Last-Event-ID", "0-0")
    if not re.fullmatch(r"\d+-\d+", last_id):
        return HttpResponse("Last-Event-ID must be the id of an event", status=400)
    return StreamingHttpResponse(events(str(answer_id), last_id), content_type="text/event-stream")


async def events(request_id, last_id):
    key = f"headrace:stream:{request_id}"
    async with redis.asyncio.from_url(settings.CELERY_BROKER_URL, protocol=2) as client:
        while True:
            for _, entries in await client.xread({key: last_id}, block=5000):
                for entry_id, fields in entries:
                    last_id = entry_id.decode()
                    data = msgpack.unpackb(fields[b"data"])
                    if fields[b"type"] == b"chunk":
                        yield f"id: {last_id}\ndata: {json.dumps({'text': data['text']})}\n\n"
                    elif fields[b"type"] == b"end":
                        error = data["error"]
                        yield f"event: end\ndata: {json.dumps({'error': error and error['code']})}\n\n"
                        return
            if await client.exists(f"headrace:ended:{request_id}") and not await client.exists(key):
                yield "event: gone\ndata: {}\n\n"  # the stream has expired: show the stored answer
                return
            yield ": waiting\n\n"  # a proxy closes a connection without bytes
