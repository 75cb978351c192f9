"""Enqueue a request, stream its tokens, show what was stored. It imports nothing of Headrace."""

import json
import re

import msgpack
import redis.asyncio
from django.conf import settings
from django.http import HttpResponse, JsonResponse, StreamingHttpResponse
from django.shortcuts import aget_object_or_404, get_object_or_404
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_GET, require_POST
from kombu.exceptions import OperationalError

from .celery import app
from .models import Answer
from .tasks import fail, store


@csrf_exempt  # for the example's sake: leave the check on where browsers have a session
@require_POST
def ask(request):
    question = request.POST.get("question")
    if not question:
        return JsonResponse({"error": "question is missing"}, status=400)
    answer = Answer.objects.create(question=question)
    try:
        send(answer)
    except OperationalError:  # Redis is away
        Answer.objects.filter(pk=answer.id, state="waiting").update(state="failed")
        return JsonResponse({"error": "try again later"}, status=503)
    return JsonResponse({"id": str(answer.id)}, status=202)


def send(answer):
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


@require_GET
def show(request, answer_id):
    answer = get_object_or_404(Answer, pk=answer_id)
    return JsonResponse({"state": answer.state, "text": answer.text})


async def stream(request, answer_id):
    """Send the tokens as server-sent events. A browser's EventSource reconnects with the id of its last event."""
    last_id = request.headers.get("Last-Event-ID", "0-0")
    if not re.fullmatch(r"\d{1,19}-\d{1,19}", last_id):  # Redis takes numbers below 2^64
        return HttpResponse("Last-Event-ID must be the id of an event", status=400)
    answer = await aget_object_or_404(Answer, pk=answer_id)
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # or nginx keeps the events back
    return StreamingHttpResponse(events(answer, last_id), content_type="text/event-stream", headers=headers)


async def events(answer, last_id):
    key = f"headrace:stream:{answer.id}"
    # redis-py 8 gives up after 5 s by default, as soon as Redis ends a wait of that length
    async with redis.asyncio.from_url(settings.CELERY_BROKER_URL, protocol=2, socket_timeout=10) as client:
        while True:
            if not await client.exists(key):
                await answer.arefresh_from_db(fields=["state"])
                if answer.state != "waiting":
                    yield "event: gone\ndata: {}\n\n"  # the stream has expired: show the stored answer
                    return
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
            yield ": waiting\n\n"  # a proxy closes a connection without bytes
