"""A Django project that enqueues requests with plain Celery, and streams their tokens: `docs/recipes.md`."""

from .celery import app as celery_app

__all__ = ["celery_app"]
