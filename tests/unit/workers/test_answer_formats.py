"""The formats of tool calls and reasoning, detected in excerpts of each family's chat templates."""

# ruff: noqa: RUF001  # DeepSeek's tags have wide bars

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel

from headrace_broker import TemplateFeatures
from headrace_engine.text.chat_history import PROBE_TOOLS, probe_call
from headrace_engine.text.chat_template import written_call
from headrace_engine.text.tokenizer_parts import TokenizerParts
from headrace_gateway.parsers.events import CallArguments, CallBegins
from headrace_gateway.parsers.registry import REASONING_PARSERS, TOOL_PARSERS, make_parser
from headrace_gateway.requests.call import Function
from headrace_workers.errors import WorkerSettingsError
from headrace_workers.preparation.answer_formats import REASONING_FORMATS, TOOL_FORMATS, AnswerFormats
from headrace_workers.settings import WorkerSettings

QWEN_25 = r"""{%- if tools %}
    {{- "\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n<tools>" }}
    {%- for tool in tools %}{{- tool | tojson }}{%- endfor %}
    {{- "\n</tools>\n\nFor each function call, return a json object within <tool_call></tool_call> XML tags:\n" }}
    {{- "<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call><|im_end|>\n" }}
{%- endif %}"""
QWEN_3 = (
    QWEN_25
    + r"""
{%- if '</think>' in content %}{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}"""
)
QWEN_3_CODER = r"""{%- if not tools is defined %}{%- set tools = [] %}{%- endif %}
{%- if tools is iterable and tools | length > 0 %}
    {{- "\n\nIf you choose to call a function ONLY reply in the following format with NO suffix:\n\n" }}
    {{- "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>\n" }}
    {{- "</function>\n</tool_call>" }}
{%- endif %}"""
LLAMA_31 = r"""{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if tools is not none and not tools_in_user_message %}
    {{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.' }}
{%- endif %}
{%- if builtin_tools is defined and tool_call.name in builtin_tools %}
    {{- "<|python_tag|>" + tool_call.name + ".call(" }}
{%- else %}
    {{- '{"name": "' + tool_call.name + '", ' }}{{- '"parameters": ' }}{{- tool_call.arguments | tojson }}{{- "}" }}
{%- endif %}"""
LLAMA_32 = r"""{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if tools is not none %}
    {{- "Environment: ipython\n" }}
    {{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.' }}
{%- endif %}
{{- '{"name": "' + tool_call.name + '", ' }}{{- '"parameters": ' }}{{- tool_call.arguments | tojson }}{{- "}" }}"""
LLAMA_4_PYTHONIC = r"""{%- if tools is not none %}
    {{- "If you decide to invoke any of the function(s), you MUST put it in the format of " }}
    {{- "[func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]" }}
{%- endif %}"""
MISTRAL = r"""{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if tools is not none and (message == user_messages[-1]) %}{{- "[AVAILABLE_TOOLS] [" }}{%- endif %}
{%- if message.tool_calls is defined and message.tool_calls is not none %}{{- "[TOOL_CALLS] [" }}{%- endif %}"""
MAGISTRAL = MISTRAL + r"""{{- 'Start with your thinking process: [THINK]Your thoughts[/THINK]Your answer.' }}"""
DEEPSEEK_CALLS = r"""{%- for tool in message['tool_calls'] %}
    {{'<｜Assistant｜><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'
    + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] + '\n' + '```json' + '\n'
    + tool['function']['arguments'] + '\n' + '```' + '<｜tool▁call▁end｜>'}}{%- endfor %}"""
DEEPSEEK_R1 = (
    DEEPSEEK_CALLS
    + r"""{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
{% if add_generation_prompt and not ns.is_tool %}{{'<｜Assistant｜><think>\n'}}{% endif %}"""
)
DEEPSEEK_V3_TOOLS = (
    r"""{% if tools is defined and tools is not none %}{{ tools | tojson }}{% endif %}""" + DEEPSEEK_CALLS
)
DEEPSEEK_V31 = r"""{% if not thinking is defined %}{% set thinking = false %}{% endif %}
{%- if message['prefix'] is defined and message['prefix'] and thinking %}{{'<think>'}}
{%- else %}{{'</think>'}}{%- endif %}
{%- for tool in message['tool_calls'] %}{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['function']['name']
    + '<｜tool▁sep｜>' + tool['function']['arguments'] + '<｜tool▁call▁end｜>'}}{%- endfor %}"""
DEEPSEEK_V31_TOOLS = (
    r"""{% if tools is defined and tools is not none %}{{ tools | tojson }}{% endif %}""" + DEEPSEEK_V31
)
GLM_45 = r"""[gMASK]<sop>
{%- if tools -%}<|system|>
For each function call, output the function name and arguments within the following XML format:
<tool_call>{function-name}
<arg_key>{arg-key-1}</arg_key>
<arg_value>{arg-value-1}</arg_value>
</tool_call>{%- endif -%}
{%- if add_generation_prompt -%}
    <|assistant|>{{- '\n<think></think>' if (enable_thinking is defined and not enable_thinking) else '' -}}
{%- endif -%}"""
GPT_OSS = r"""{%- if reasoning_effort is not defined %}{%- set reasoning_effort = "medium" %}{%- endif %}
{{- "Reasoning: " + reasoning_effort + "\n\n" }}
{%- if tools %}{{- "\nCalls to these tools must go to the commentary channel: 'functions'." }}{%- endif %}
{{- "<|start|>developer<|message|>" }}
{{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}"""
GRANITE_31 = r"""{%- if tools %}
    {%- set system_message = system_message + " When a tool is required to answer the user's query, respond with
    <|tool_call|> followed by a JSON list of tools used." %}
{%- endif %}
{%- if tools %}{{- '<|start_of_role|>tools<|end_of_role|>' }}{{- tools | tojson(indent=4) }}{%- endif %}"""
PHI_4_MINI = r"""{% if message['role'] == 'system' and 'tools' in message and message['tools'] is not none %}
{{ '<|' + message['role'] + '|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' }}{% endif %}"""
PHI_4_MINI_TOOLS = r"""{%- if tools %}
{{- 'You can call functions with this format: functools[{"name": [function name], "arguments": [arguments]}, ...]' }}
{{- tools | tojson }}{%- endif %}"""
SMOLLM_2 = r"""{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}
{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}
{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"""


def formats(template: str | None, *special: str, said: AnswerFormats = AnswerFormats(), **parts: Any) -> dict[str, Any]:  # noqa: B008
    """Return what a worker registers for a model with this template and these special tokens."""
    backend = Tokenizer(WordLevel({"?": 0}, unk_token="?"))
    backend.add_special_tokens([AddedToken(text, special=True) for text in special])
    tokenizer: Any = SimpleNamespace(backend=backend)
    content = backend.to_str().encode()
    return said.of(
        TokenizerParts(tokenizer_json=content, chat_template=template, special_tokens={}, **parts), tokenizer
    )


@pytest.mark.parametrize(
    ("template", "tool_parser", "reasoning_parser"),
    [
        pytest.param(QWEN_25, "hermes", None, id="qwen2.5"),
        pytest.param(QWEN_3, "hermes", "think", id="qwen3"),
        pytest.param(QWEN_3_CODER, "qwen3_xml", None, id="qwen3-coder"),
        pytest.param(LLAMA_31, "llama3_json", None, id="llama3.1"),
        pytest.param(LLAMA_32, "llama3_json", None, id="llama3.2"),
        pytest.param(LLAMA_4_PYTHONIC, "pythonic", None, id="llama4-pythonic"),
        pytest.param(MISTRAL, "mistral", None, id="mistral"),
        pytest.param(MAGISTRAL, "mistral", "mistral", id="magistral"),
        pytest.param(DEEPSEEK_V3_TOOLS, "deepseek_v3", None, id="deepseek-v3-with-tools"),
        pytest.param(DEEPSEEK_R1, None, "think", id="deepseek-r1-shows-no-tools"),
        pytest.param(DEEPSEEK_V31_TOOLS, "deepseek_v31", "think", id="deepseek-v3.1-with-tools"),
        pytest.param(DEEPSEEK_V31, None, "think", id="deepseek-v3.1-shows-no-tools"),
        pytest.param(GLM_45, "glm45", "think", id="glm-4.5"),
        pytest.param(GPT_OSS, "openai", "openai", id="gpt-oss"),
        pytest.param(GRANITE_31, "granite", None, id="granite-3.1"),
        pytest.param(PHI_4_MINI_TOOLS, "phi4_mini_json", None, id="phi4-mini-with-tools"),
        pytest.param(PHI_4_MINI, None, None, id="phi4-mini-takes-tools-in-a-message"),
        pytest.param(SMOLLM_2, None, None, id="smollm2"),
        pytest.param(None, None, None, id="no-template"),
    ],
)
def test_the_formats_of_a_family_are_detected_in_its_template(
    template: str | None, tool_parser: str | None, reasoning_parser: str | None
) -> None:
    found = formats(template)
    assert (found["tool_parser"], found["reasoning_parser"]) == (tool_parser, reasoning_parser)
    make_parser(tool_parser, reasoning_parser, tools=(), prompt_tail=None)  # the gateway can parse both together


@pytest.mark.parametrize(
    ("template", "features"),
    [
        pytest.param(None, TemplateFeatures(), id="no-template"),
        pytest.param(SMOLLM_2, TemplateFeatures(exists=True), id="smollm2"),
        pytest.param(QWEN_25, TemplateFeatures(exists=True, tools=True), id="qwen2.5"),
        pytest.param(QWEN_3, TemplateFeatures(exists=True, tools=True, thinking="enable_thinking"), id="qwen3"),
        pytest.param(DEEPSEEK_V31, TemplateFeatures(exists=True, thinking="thinking"), id="deepseek-v3.1"),
        pytest.param(
            GPT_OSS, TemplateFeatures(exists=True, tools=True, developer=True, reasoning_effort=True), id="gpt-oss"
        ),
    ],
)
def test_the_variables_that_a_template_reads_are_detected(template: str | None, features: TemplateFeatures) -> None:
    assert formats(template)["template"] == features


@pytest.mark.parametrize(
    ("template", "tag"),
    [
        (QWEN_25, "<tool_call>"),
        (LLAMA_31, "<|python_tag|>"),
        (MISTRAL, "[TOOL_CALLS]"),
        (GRANITE_31, "<|tool_call|>"),
        (GPT_OSS, "<|channel|>"),
        (DEEPSEEK_V3_TOOLS, "<｜tool▁calls▁begin｜>"),
    ],
)
def test_tags_that_are_special_tokens_are_reported(template: str, tag: str) -> None:
    assert formats(template, "<eos>", tag)["template"].special_tags
    assert not formats(template, "<eos>")["template"].special_tags


@pytest.mark.parametrize(("template", "tag"), [(QWEN_3, "</think>"), (MAGISTRAL, "[THINK]"), (GPT_OSS, "<|channel|>")])
def test_tags_of_reasoning_that_are_special_tokens_are_reported(template: str, tag: str) -> None:
    assert formats(template, "<eos>", tag)["template"].special_think_tags
    assert not formats(template, "<eos>")["template"].special_think_tags


def test_a_separate_template_for_tools_takes_precedence() -> None:
    assert formats(SMOLLM_2, tool_chat_template=QWEN_25)["tool_parser"] == "hermes"


def test_a_template_with_tags_that_jinja_does_not_know_is_read() -> None:
    template = (
        "{%- generation -%}{{ message.content }}{% break %}{% endgeneration %}"
        "{% if tools %}<tool_call> name, arguments{% endif %}"
    )
    assert formats(template.replace("{% break %}", ""))["tool_parser"] == "hermes"
    assert formats("{% unknown_tag %} tools <tool_call> arguments")["tool_parser"] == "hermes"


def test_the_operators_choice_takes_precedence_over_the_template() -> None:
    said = formats(QWEN_3, said=AnswerFormats("none", "none"))
    assert (said["tool_parser"], said["reasoning_parser"]) == (None, None)
    said = formats(SMOLLM_2, said=AnswerFormats("granite", "mistral"))
    assert (said["tool_parser"], said["reasoning_parser"]) == ("granite", "mistral")


def test_a_detected_format_is_dropped_if_it_does_not_fit_the_operators_choice() -> None:
    said = formats(QWEN_3, said=AnswerFormats(tool_parser="openai"))
    assert (said["tool_parser"], said["reasoning_parser"]) == ("openai", "openai")
    said = formats(GPT_OSS, said=AnswerFormats(reasoning_parser="think"))
    assert (said["tool_parser"], said["reasoning_parser"]) == (None, "think")


def shown(call: str, before: str = "") -> str:
    """A template that shows tools, and earlier calls in this form."""
    return (
        "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<|{{ m.role }}|>"
        "{% if m.tool_calls %}" + before + "{% for c in m.tool_calls %}" + call + "{% endfor %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )


JSON = "{{ c.function.arguments | tojson }}"
OBJECT = '{"name": "{{ c.function.name }}", "arguments": ' + JSON + "}"
XML = (
    "<function={{ c.function.name }}>\n{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>\n{{ v }}\n"
    "</parameter>\n{% endfor %}</function>"
)
NAME = "{{ c.function.name }}"
GLM_ARGUMENTS = (
    "{% for k, v in c.function.arguments.items() %}"
    "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n{% endfor %}"
)
DEEPSEEK = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
INVOKE = f'<tool_call><invoke name="{NAME}">{JSON}</invoke></tool_call>'
PYTHON = (
    "{{ c.function.name }}({% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }}"
    "{{ '' if loop.last else ', ' }}{% endfor %})"
)


@pytest.mark.parametrize(
    ("template", "tool_parser"),
    [
        (shown(f"<tool_call>\n{OBJECT}\n</tool_call>"), "hermes"),
        (shown(f"<tool_call>\n{XML}\n</tool_call>"), "qwen3_xml"),
        (shown(f"<seed:tool_call>\n{XML}\n</seed:tool_call>"), "qwen3_xml"),
        (shown("<tool_call>{{ c.function.name }}\n" + GLM_ARGUMENTS + "</tool_call>"), "glm45"),
        (shown(OBJECT.replace('arguments"', 'parameters"')), "llama3_json"),
        (shown("[TOOL_CALLS]{{ c.function.name }}[ARGS]" + JSON), "mistral"),
        (shown(f"[{OBJECT}]", before="[TOOL_CALLS]"), "mistral"),
        (shown(f"functools[{OBJECT}]"), "phi4_mini_json"),
        (shown(f"<|tool_call|>[{OBJECT}]"), "granite"),
        (shown(f"[{PYTHON}]"), "pythonic"),
        (shown(f"<function_calls>{PYTHON}</function_calls>"), "pythonic"),
        (shown(DEEPSEEK.format(NAME, JSON)), "deepseek_v31"),
        (shown(DEEPSEEK.format("function", f"{NAME}\n```json\n{JSON}\n```")), "deepseek_v3"),
        (shown(f" to=functions.{NAME}<|channel|>commentary json<|message|>{JSON}<|call|>"), "openai"),
        # these have no parser, though they contain texts of the others
        pytest.param(shown("<function={{ c.function.name }}>" + JSON + "</function>"), None, id="functionary 3.1"),
        pytest.param(
            shown('<|START_ACTION|>[{"tool_name": "{{ c.function.name }}", "parameters": ' + JSON + "}]<|END_ACTION|>"),
            None,
            id="command",
        ),
        pytest.param(shown(INVOKE), None, id="minimax"),
        pytest.param(shown(f"<tool_calls>[{OBJECT}]</tool_calls>"), None, id="apriel"),
        pytest.param(shown(f"<|tool_call_start|>[{PYTHON}]<|tool_call_end|>"), None, id="lfm2"),
    ],
)
def test_the_format_of_an_earlier_call_is_the_one_whose_parser_reads_it(template: str, tool_parser: str | None) -> None:
    assert formats(template)["tool_parser"] == tool_parser
    written = written_call(template, {})
    assert written is not None
    function = probe_call("a")["function"]
    tools = [Function(function["name"], PROBE_TOOLS[0]["function"]["parameters"])]
    readers = set()
    for name in TOOL_PARSERS:
        parser = make_parser(name, None, tools=tools, prompt_tail=None)
        events = [*parser.feed(written), *parser.finish()]
        arguments = "".join(event.json for event in events if isinstance(event, CallArguments))
        others = [event for event in events if not isinstance(event, CallArguments | CallBegins)]
        if arguments and not others and json.loads(arguments) == function["arguments"]:
            readers.add(name)
    assert tool_parser in readers if tool_parser is not None else not readers


def test_workers_and_gateways_have_the_same_formats() -> None:
    assert set(TOOL_FORMATS) == TOOL_PARSERS
    assert set(REASONING_FORMATS) == REASONING_PARSERS


def test_every_format_is_documented() -> None:
    text = (Path(__file__).parents[3] / "docs" / "tool-calls.md").read_text(encoding="utf-8")
    rows = "".join(line.split("|")[1] for line in text.splitlines() if line.startswith("| `"))
    assert {name for name in TOOL_PARSERS | REASONING_PARSERS if f"`{name}`" not in rows} == set()


def settings(monkeypatch: pytest.MonkeyPatch, tool_parser: str, reasoning_parser: str) -> WorkerSettings:
    monkeypatch.setenv("HEADRACE_MODEL", "/models/some-model")
    monkeypatch.setenv("HEADRACE_TOOL_PARSER", tool_parser)
    monkeypatch.setenv("HEADRACE_REASONING_PARSER", reasoning_parser)
    return WorkerSettings.from_env()


def test_every_format_may_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for tool_parser in ("auto", "none", *TOOL_FORMATS):
        assert settings(monkeypatch, tool_parser, "auto").tool_parser == tool_parser
    for reasoning_parser in ("auto", "none", *REASONING_FORMATS):
        assert settings(monkeypatch, "hermes", reasoning_parser).reasoning_parser == reasoning_parser
    assert settings(monkeypatch, "openai", "openai").reasoning_parser == "openai"


def test_an_unknown_format_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        WorkerSettingsError, match=r"HEADRACE_TOOL_PARSER .*must be auto, none or one of openai, .*'xml'"
    ):
        settings(monkeypatch, "xml", "auto")
    with pytest.raises(WorkerSettingsError, match=r"HEADRACE_REASONING_PARSER .*think, got 'deepseek_r1'"):
        settings(monkeypatch, "auto", "deepseek_r1")


@pytest.mark.parametrize("reasoning_parser", ["think", "mistral"])
def test_formats_that_exclude_each_other_are_refused(monkeypatch: pytest.MonkeyPatch, reasoning_parser: str) -> None:
    with pytest.raises(WorkerSettingsError, match=r"HEADRACE_REASONING_PARSER .*if HEADRACE_TOOL_PARSER is openai"):
        settings(monkeypatch, "openai", reasoning_parser)
