"""`cd tests && python -m vllm_api`: write docs/vllm.md."""

from vllm_api.page import PAGE, page

PAGE.write_text(page())
