"""The project's own Celery application, as Celery's guide for Django has it."""

import os

from celery import Celery

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "django_answers.settings")
app = Celery("django_answers")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks(["django_answers"])
