"""Set-up of each process that runs a part of the model. vLLM's executors may start further processes for ranks."""

import logging
import multiprocessing

from headrace_engine_vllm.log_lines import guard_logs


class RankExtension:
    """vLLM's `worker_extension_cls`. Through it, each rank imports this module."""


if multiprocessing.parent_process() is not None:  # a separate rank: its log lines go to the worker's standard error
    logging.basicConfig(level=logging.WARNING)
    guard_logs().is_serving = True
