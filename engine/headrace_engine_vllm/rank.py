"""What each process that runs a part of the model does first. vLLM's executors may start others than the core's."""

import logging
import multiprocessing

from headrace_engine_vllm.log_lines import guard_logs


class RankExtension:
    """Named as vLLM's `worker_extension_cls`, so that each rank imports this module."""


if multiprocessing.parent_process() is not None:  # a rank of its own: its lines go to the worker's standard error
    logging.basicConfig(level=logging.WARNING)
    guard_logs().is_serving = True
