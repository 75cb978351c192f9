"""Celery as this worker changes it: its steps, consumer, strategy, task, results, and remote control.

How a message is prepared and answered is in `preparation` and `requests`.
"""
