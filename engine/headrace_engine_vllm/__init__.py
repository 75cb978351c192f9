"""vLLM as an engine of Headrace: its scheduler and model runners behind the frames of `headrace_engine.core.frames`.

The parent imports `ENGINE` and the checks of options. Only the child imports vLLM, which may be installed in another
environment (`engine_python`).
"""

from headrace_engine_vllm.engine import ENGINE as ENGINE
