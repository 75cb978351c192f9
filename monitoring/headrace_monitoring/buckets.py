"""Histogram buckets, and the service level objectives. Each objective is the upper bound of a bucket.

A quantile of a histogram is interpolated. The share of observations up to a bound is exact. Alerts compare that share
with the objective.
"""

# Seconds. The alert rules and the dashboards use the same values.
TIME_TO_FIRST_TOKEN_OBJECTIVE = 2.5
INTER_TOKEN_LATENCY_OBJECTIVE = 0.1
QUEUE_WAIT_OBJECTIVE = 30.0

TIME_TO_FIRST_TOKEN = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
INTER_TOKEN_LATENCY = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
QUEUE_WAIT = (0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 14400)
REQUEST_DURATION = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600, 14400)
STEP_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
STEP_REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
REQUEST_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
TENANT_QUEUE_WAIT = (0.1, 1, 5, 30, 120, 600, 3600)
ENGINE_STAGE = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
LOOP_LAG = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 15, 60)
REDIS_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 5)
