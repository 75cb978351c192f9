"""vLLM as an engine of Headrace: its scheduler and model runners behind the frames of `headrace_engine.core.frames`.

The parent imports `ENGINE` and what it needs to check options. vLLM is imported in the child alone, by `core` and what
it imports; it may live in another environment (`engine_python`).
"""

from headrace_engine_vllm.engine import ENGINE as ENGINE
