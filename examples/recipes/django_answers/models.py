import uuid

from django.db import models


class Answer(models.Model):
    id = models.UUIDField(primary_key=True, default=uuid.uuid4)  # also the id of the request: it must be unguessable
    question = models.TextField()
    text = models.TextField(blank=True)
    state = models.CharField(max_length=10, default="waiting")  # then done or failed
