"""What happens when a request has ended. `celery -A django_answers worker` runs it; Headrace's worker sends it."""

from celery import shared_task

from .models import Answer


@shared_task(name="answers.store")
def store(result):
    text = result["outputs"][0]["text"]
    Answer.objects.filter(pk=result["request_id"]).update(text=text, state="done")


@shared_task(name="answers.fail")
def fail(request_id):
    Answer.objects.filter(pk=request_id).update(state="failed")
