"""The settings that the recipe needs; a project of yours has more."""

import os

SECRET_KEY = os.environ.get("SECRET_KEY", "for development only")
ALLOWED_HOSTS = ["127.0.0.1"]
INSTALLED_APPS = ["django_answers"]
ROOT_URLCONF = "django_answers.urls"
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": os.environ.get("DATABASE", "answers.sqlite3")}}
USE_TZ = True

CELERY_BROKER_URL = CELERY_RESULT_BACKEND = os.environ.get("HEADRACE_REDIS_URL", "redis://127.0.0.1:6379/0")
HEADRACE_QUEUE = "headrace." + os.environ.get("MODEL", "smollm2-135m-instruct")
