"""An engine of one page: pure Python, no weights, and every promise kept. It may be told to break one."""

from __future__ import annotations

from typing import Any

FAULTS = frozenset(
    {
        "batch_draws",
        "claims_what_no_request_can_ask_for",
        "cold_statistics",
        "dies_of_a_long_prompt",
        "doubled_token",
        "end_token_as_stop_reason",
        "equal_seeds",
        "ignores_priority",
        "ignores_stop",
        "keeps_aborted",
        "leaks_blocks",
        "loses_stop_token",
        "min_tokens_from_the_resume",
        "no_error_for_an_adapter",
        "order_backwards",
        "processed_logprobs",
        "prompt_logprobs_again",
        "resumes_ended",
        "resumes_prompt",
        "sends_emitted",
        "serves_less_than_it_claims",
        "starts_with_any_option",
        "survives_its_parent",
        "unanswered_call",
        "wrong_rank",
    }
)


class SmallEngine:
    """What the parent knows of it."""

    name = "small"
    child_module = "unit.engine.small_engine.child"
    install_command = "nothing"
    stall_seconds = None

    def problems(self, args: Any) -> list[str]:
        if args.engine_args.get("fault") == "starts_with_any_option":
            return []
        problems = []
        if args.num_blocks is not None or args.kv_cache_memory is not None:
            problems.append("num_blocks and kv_cache_memory: engine small has no KV memory that could be set")
        unknown = set(args.engine_args) - {"fault"}
        if unknown or args.engine_args.get("fault") not in {None, *FAULTS}:
            problems.append(f"engine_args holds {', '.join(args.engine_args)}, known is fault")
        if args.max_model_len is not None and args.max_model_len > 1 << 16:
            problems.append(f"max_model_len is {args.max_model_len}, at most {1 << 16} is possible")
        if not args.model.startswith("small"):
            problems.append(f"model is {args.model}, known are those whose name begins with small")
        return problems

    def environment(self, _: Any) -> dict[str, str]:
        return {}


ENGINE = SmallEngine()
