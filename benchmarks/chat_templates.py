"""Counts the chat templates whose histories of tool calls and detected formats are right.

    python benchmarks/chat_templates.py FOLDER [--all]

The folder holds templates of real models (*.jinja), for example from the sdists of llama-cpp-python, trl and axolotl on
PyPI. For each template it renders four conversations with calls and looks for names, arguments and results in the
prompt, and it lets the detected parser of the gateway read the call that the template writes.
"""

import argparse
import json
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from headrace_engine.text.chat import ChatOptions, read_messages
from headrace_engine.text.chat_template import reads_variable, rendered
from headrace_engine.text.tokenizer_parts import TokenizerParts
from headrace_gateway.parsers.events import CallArguments, CallBegins, Content
from headrace_gateway.parsers.registry import make_parser
from headrace_gateway.requests.call import Function
from headrace_workers.preparation.answer_formats import AnswerFormats

QUESTION = "Which colour?"
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
ARGUMENTS = {
    letter: {f"key_{letter}{letter}": f"value_{letter}{letter}", f"count_{letter}{letter}": 7} for letter in "ab"
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": f"benchmark_{letter}",
            "description": "A tool.",
            "parameters": {
                "type": "object",
                "properties": {
                    f"key_{letter}{letter}": {"type": "string", "description": "A text."},
                    f"count_{letter}{letter}": {"type": "integer", "description": "A number."},
                },
                "required": [f"key_{letter}{letter}"],
            },
        },
    }
    for letter in "ab"
]


def conversation(letters: str, content: str | None, *, goes_on: bool) -> list[dict[str, Any]]:
    """Return a chat as a client sends it back, with the ids of this gateway."""
    ids = {letter: f"call_{letter * 24}" for letter in letters}
    calls = [
        {
            "id": ids[letter],
            "type": "function",
            "function": {"name": f"benchmark_{letter}", "arguments": json.dumps(ARGUMENTS[letter])},
        }
        for letter in letters
    ]
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": content, "tool_calls": calls},
    ]
    chat += [{"role": "tool", "tool_call_id": ids[letter], "content": f"result_{letter}{letter}"} for letter in letters]
    return chat + ([{"role": "assistant", "content": "Done."}, {"role": "user", "content": "And?"}] if goes_on else [])


def problem_of(template: str, letters: str, content: str | None, *, goes_on: bool, tools: bool) -> str | None:
    """Return what is wrong with the prompt; None if it shows all of each call."""
    chat = read_messages(conversation(letters, content, goes_on=goes_on))
    try:
        text = rendered(template, chat, ChatOptions(tools=TOOLS if tools else None), SPECIAL)
    except Exception as error:  # noqa: BLE001  # a template may raise anything
        return f"refused: {str(error)[:80]}"
    text = text[text.find(QUESTION) :]  # a template may show the tools before as a Python literal
    for letter in letters:
        for each in (f"key_{letter}{letter}", f"value_{letter}{letter}", f"result_{letter}{letter}"):
            start = text.rfind(f"value_{letter}{letter}") if each.startswith("result") else 0
            if start < 0 or text.find(each, start) < 0:
                return f"{each} is missing"
        if f'\\"key_{letter}{letter}' in text or f"'key_{letter}{letter}':" in text:
            return "the arguments are no plain JSON"
    return None


def reads(parser: str, template: str) -> bool:
    """Return whether a parser of the gateway reads the call that the template writes, and leaves no text of it."""
    options = ChatOptions(tools=TOOLS, add_generation_prompt=False)
    chat = read_messages(conversation("a", None, goes_on=False)[:2])
    try:
        asked = rendered(template, chat[:1], ChatOptions(tools=TOOLS), SPECIAL)
        whole = rendered(template, chat, options, SPECIAL)
    except Exception:  # noqa: BLE001
        return False
    same = 0
    while same < min(len(asked), len(whole)) and asked[same] == whole[same]:
        same += 1
    written = whole[whole.rfind("<", 0, same) if whole.rfind("<", 0, same) > whole.rfind(">", 0, same) else same :]
    function = TOOLS[0]["function"]
    tool = Function(function["name"], function["parameters"])
    made = make_parser(parser, None, tools=[tool], prompt_tail=None)
    events = [*made.feed(written), *made.finish()]
    names = [event.name for event in events if isinstance(event, CallBegins)]
    arguments = "".join(event.json for event in events if isinstance(event, CallArguments))
    content = "".join(event.text for event in events if isinstance(event, Content))
    try:
        is_read = names == [function["name"]] and json.loads(arguments) == ARGUMENTS["a"]
    except ValueError:
        return False
    return is_read and re.search("benchmark_|tool|function|call", content) is None


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("folder", type=Path)
    options.add_argument("--all", action="store_true", help="show the templates that are right, too")
    given = options.parse_args()
    backend = Tokenizer(WordLevel({"?": 0}, unk_token="?"))
    counts: Counter[str] = Counter()
    for path in sorted(given.folder.rglob("*.jinja")):
        template = path.read_text(encoding="utf-8")
        if "{" not in template or "messages" not in template:
            continue
        has_tools = reads_variable(template, "tools")
        cases = [("a", None, False), ("a", None, True), ("ab", "", False), ("a", "I will.", False)]
        found = [
            problem_of(template, letters, content, goes_on=goes_on, tools=has_tools)
            for letters, content, goes_on in cases
        ]
        problems = [each for each in found if each is not None]
        parts = TokenizerParts(tokenizer_json=backend.to_str().encode(), chat_template=template, special_tokens=SPECIAL)
        tokenizer: Any = SimpleNamespace(backend=backend)
        parser = AnswerFormats().of(parts, tokenizer)["tool_parser"]
        group = "with tools" if has_tools else "without tools"
        counts[f"{group}: templates"] += 1
        counts[f"{group}: first history right"] += found[0] is None
        counts[f"{group}: all histories right"] += not problems
        verdict = "-"
        if has_tools:
            shows = "tool_calls" in template and found[0] is None and "<tool_call>\n{" not in str(problems)
            right = parser is not None and reads(parser, template)
            verdict = "right" if right else "unknown" if parser is None else "wrong or not shown" if shows else "told"
            counts[f"{group}: format {verdict}"] += 1
        if given.all or problems or verdict not in ("right", "-"):
            print(f"{path.name:70} {parser!s:15} {verdict:10} {'; '.join(dict.fromkeys(problems))}")
    for name, count in sorted(counts.items()):
        print(f"{count:4} {name}")


if __name__ == "__main__":
    main()
