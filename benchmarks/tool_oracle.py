"""Parse the recorded outputs of canitoolcall, cut in several ways, and print the results of its checks.

`make tool-oracle` installs the package (Apache-2.0) and runs this. The table is in docs/tool-calls.md. The exit status
is 1 if an output fails for a reason that is not listed here.
"""

import sys
from collections import Counter, defaultdict
from typing import Final

from canitoolcall.checks import run_checks
from canitoolcall.chunking import ChunkStrategy, split_text
from canitoolcall.fixtures import Family, Fixture, load_families, load_fixtures
from canitoolcall.results import CheckResult, Observation, ParsedToolCall, ParseResult, Status

from headrace_gateway.parsers.events import CallArguments, CallBegins, Content, Reasoning
from headrace_gateway.parsers.registry import make_parser
from headrace_gateway.requests.call import Function

# By the variants of its reference models: a tool parser, and a reasoning parser.
PARSERS: Final = {
    "qwen3-hybrid": ("hermes", "think"),
    "qwen3-thinking-2507": ("hermes", "think"),
    "qwen3-instruct-2507": ("hermes", None),
    "qwen3.5": ("qwen3_xml", "think"),
    "qwen3.6": ("qwen3_xml", "think"),
    "qwen3.8": ("qwen3_xml", "think"),
    "qwen3-coder": ("qwen3_xml", None),
    "qwen3-coder-next": ("qwen3_xml", None),
    "llama3-json": ("llama3_json", None),
    "llama4-pythonic": ("pythonic", None),
    "v13-think": ("mistral", "mistral"),
    "v13plus-think": ("mistral", "mistral"),
    "v13": ("mistral", None),
    "devstral-2507": ("mistral", None),
    "v11": ("mistral", None),
    "v11-think-text": ("mistral", "mistral"),
    "v3": ("mistral", None),
    "deepseek-v3": ("deepseek_v3", "think"),
    "deepseek-v31": ("deepseek_v31", "think"),
    "gpt-oss": ("openai", "openai"),
    "glm45-newline": ("glm45", "think"),
    "glm47-compact": ("glm45", "think"),
    "glm53-compact": ("glm45", "think"),
}
CUTS: Final = tuple(map(ChunkStrategy.parse, ("one", "rand:1:8", "rand:2:8", "rand:3:40", "char:0", "char:1")))
CUT: Final = "max_tokens cut the call: its first part is reported, as the stream has sent it already"
KNOWN: Final = {
    "deepseek/vllm-v3-malformed-missing-brace": "the arguments are no JSON: they are passed on as the model wrote them",
    "gpt-oss/llamacpp-builtin-python-recipient": "the call is for a tool that was not given: it is content",
}


def main() -> int:
    families = load_families()
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    reasons: Counter[str] = Counter()
    unexplained = 0
    for fixture in load_fixtures():
        outcome, detail = outcome_of(fixture, families[fixture.family])
        counts[fixture.family][outcome] += 1
        if outcome == "failed":
            reason = KNOWN.get(fixture.id) or (CUT if "truncated" in fixture.tags and "call" in detail else None)
            reasons[reason or "unexplained"] += 1
            if reason is None:
                unexplained += 1
                print(f"{fixture.id}: {detail}")
    print("| outputs of | passed | failed | no parser |\n|---|---|---|---|")
    for family, counted in sorted(counts.items()):
        print(f"| {family} | {counted['passed']} | {counted['failed']} | {counted['none']} |")
    total = sum(counts.values(), Counter[str]())
    print(f"| all | {total['passed']} | {total['failed']} | {total['none']} |\n")
    for reason, number in reasons.most_common():
        print(f"{number} failed: {reason}")
    return 1 if unexplained else 0


def outcome_of(fixture: Fixture, family: Family) -> tuple[str, str]:
    """Return passed, failed or none (no parser), and the first failed check."""
    model = family.reference_for(fixture.reference_model)
    if model is None or model.variant not in PARSERS:
        return "none", ""
    prompt = fixture.generation_prompt
    if prompt is None:
        prompt = model.default_generation_prompt
    streams = {cut.id: parsed(fixture, model.variant, prompt, split_text(fixture.raw_output, cut)) for cut in CUTS}
    rows = run_checks(fixture, family, Observation(nonstream=streams["one"], streams=streams))
    failed = [row for row in rows if row.status in (Status.FAIL, Status.ERROR)]
    return ("failed", told(failed[0])) if failed else ("passed", "")


def parsed(fixture: Fixture, variant: str, prompt: str, pieces: list[str]) -> ParseResult:
    functions = [tool["function"] for tool in fixture.tools]
    tools = [Function(name=function["name"], parameters=function.get("parameters")) for function in functions]
    tool_parser, reasoning_parser = PARSERS[variant]
    parser = make_parser(tool_parser, reasoning_parser, tools=tools, prompt_tail=prompt)
    content, reasoning = "", ""
    calls: list[ParsedToolCall] = []
    for event in [event for piece in pieces for event in parser.feed(piece)] + parser.finish():
        match event:
            case Content(text):
                content += text
            case Reasoning(text):
                reasoning += text
            case CallBegins(_, name):
                calls.append(ParsedToolCall(name, ""))
            case CallArguments(_, json):
                calls[-1] = ParsedToolCall(calls[-1].name, (calls[-1].arguments_raw or "") + json)
    return ParseResult(content=content or None, reasoning_content=reasoning or None, tool_calls=tuple(calls))


def told(row: CheckResult) -> str:
    return f"{row.check} ({row.strategy}): {row.detail}"


if __name__ == "__main__":
    sys.exit(main())
