"""Parse the recorded outputs of canitoolcall, cut in several ways, and print what its checks say.

`make tool-oracle` installs the package (Apache-2.0) and runs this. The table is in docs/tool-calls.md.
"""

import sys
from collections import Counter, defaultdict
from typing import Final

from canitoolcall.checks import run_checks
from canitoolcall.chunking import ChunkStrategy, split_text
from canitoolcall.fixtures import Family, Fixture, load_families, load_fixtures
from canitoolcall.results import CheckResult, Observation, ParsedToolCall, ParseResult, Status

from headrace_gateway.call import ToolForm
from headrace_gateway.parsers.events import CallArguments, CallBegins, Content, Reasoning
from headrace_gateway.parsers.registry import make_parser

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
CUT_CALL: Final = "a call that max_tokens cut is reported as far as it came"


def main() -> int:
    families = load_families()
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    failures: list[str] = []
    reasons: Counter[str] = Counter()
    for fixture in load_fixtures():
        outcome, detail = outcome_of(fixture, families[fixture.family])
        counts[fixture.family][outcome] += 1
        if outcome == "failed":
            reason = CUT_CALL if "truncated" in fixture.tags and "tool call" in detail else detail
            reasons[reason] += 1
            if reason != CUT_CALL or "-v" in sys.argv:
                failures.append(f"{fixture.id}: {detail}")
    for line in failures:
        print(line)
    print("\n| outputs of | passed | failed | no parser |\n|---|---|---|---|")
    for family, counted in sorted(counts.items()):
        print(f"| {family} | {counted['passed']} | {counted['failed']} | {counted['none']} |")
    total = sum(counts.values(), Counter())
    print(f"| all | {total['passed']} | {total['failed']} | {total['none']} |")
    for reason, number in reasons.most_common():
        print(f"{number} failed: {reason[:200]}")
    return 0


def outcome_of(fixture: Fixture, family: Family) -> tuple[str, str]:
    """Return passed, failed or none (no parser), and what failed first."""
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
    tools = [ToolForm(name=function["name"], parameters=function.get("parameters")) for function in functions]
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
