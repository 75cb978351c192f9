"""What happens when a request has ended. `celery -A django_answers worker` runs it; Headrace's worker sends it."""

from celery import shared_task
from django.db import OperationalError

from .models import Answer

# The answer is sent once, so a task that fails or whose worker dies must run again, until it has stored it.
RETRIED = {"autoretry_for": (OperationalError,), "retry_backoff": True, "max_retries": None, "acks_late": True}


@shared_task(name="answers.store", **RETRIED)
def store(result):
    text = result["outputs"][0]["text"]
    Answer.objects.filter(pk=result["request_id"]).update(text=text, state="done")


@shared_task(name="answers.fail", **RETRIED)
def fail(request_id):
    Answer.objects.filter(pk=request_id).update(state="failed")
