"""`uvicorn django_answers.asgi:app`: a stream takes no thread of a server for ASGI."""

import os

from django.core.asgi import get_asgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "django_answers.settings")
app = get_asgi_application()
