"""langchain-openai, by chat completions; completions and embeddings too."""

from typing import Literal

import pydantic
from checks import TEXTS, Site, check, is_colour, main, same, same_rows
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

QUESTION = [HumanMessage("Say hello.")]


class Answer(pydantic.BaseModel, extra="forbid"):
    """What the wall shall be."""

    colour: Literal["red", "green"]


@tool
def paint(colour: Literal["red", "green"]) -> str:
    """Paint the wall."""
    return f"it is {colour}"


def chat(site: Site, **options) -> ChatOpenAI:
    fixed = {"base_url": site.url, "api_key": "none", "temperature": 0, "max_retries": 0}
    return ChatOpenAI(model=site.model, **{**fixed, "max_tokens": 12, **options})


@check("invoke, stream with usage, batch")
def stream(site: Site) -> None:
    plain = chat(site).invoke(QUESTION)
    total = None
    for chunk in chat(site, stream_usage=True).stream(QUESTION):
        total = chunk if total is None else total + chunk
    same(total.content, plain.content)
    same(total.usage_metadata, plain.usage_metadata)
    same(total.response_metadata["finish_reason"], plain.response_metadata["finish_reason"])
    same([each.content for each in chat(site).batch([QUESTION, QUESTION])], [plain.content] * 2)


@check("astream, logprobs")
async def logprobs(site: Site) -> None:
    total = None
    async for chunk in chat(site).bind(logprobs=True, top_logprobs=2).astream(QUESTION):
        total = chunk if total is None else total + chunk
    found = total.response_metadata["logprobs"]["content"]
    same("".join(each["token"] for each in found)[: len(total.content)], total.content)


@check("bind_tools with tool_choice by name, any and auto; streamed; the result goes back")
def tools(site: Site) -> None:
    model = chat(site, max_tokens=100)
    for choice in ("paint", "any"):
        bound = model.bind_tools([paint], tool_choice=choice, parallel_tool_calls=False)
        message = bound.invoke(QUESTION)
        (call,) = message.tool_calls
        same(call["name"], "paint")
        is_colour(call["args"])
        total = None
        for chunk in bound.stream(QUESTION):
            total = chunk if total is None else total + chunk
        same([each["args"] for each in total.tool_calls], [call["args"]])
    result = ToolMessage(paint.invoke(call["args"]), tool_call_id=call["id"])
    after = chat(site).bind_tools([paint]).invoke([*QUESTION, message, result])
    assert after.content


@check("with_structured_output: json_schema (strict and not), function_calling, json_mode")
def structured(site: Site) -> None:
    model = chat(site, max_tokens=100)
    for options in (
        {"method": "json_schema", "strict": True},
        {"method": "json_schema"},
        {"method": "function_calling"},
    ):
        found = model.with_structured_output(Answer, **options).invoke(QUESTION)
        assert isinstance(found, Answer), found
    found = model.with_structured_output(Answer.model_json_schema(), method="json_schema").invoke(QUESTION)
    is_colour(found)
    # the mode promises an object of any kind
    is_colour(model.with_structured_output(None, method="json_mode").invoke('Write {"colour": "red"} as JSON.'))
    *_, last = model.with_structured_output(Answer).stream(QUESTION)
    assert isinstance(last, Answer), last


@check("a prompt that is too long is langchain's ContextOverflowError")
def too_long(site: Site) -> None:
    try:
        chat(site).invoke("word " * 9000)
    except ContextOverflowError:
        return
    raise AssertionError("no ContextOverflowError")


@check("OpenAI (completions), streamed")
def completions(site: Site) -> None:
    llm = OpenAI(base_url=site.url, api_key="none", model=site.model, temperature=0, max_tokens=8, max_retries=0)
    same("".join(llm.stream("Once upon a")), llm.invoke("Once upon a"))
    same(len(llm.generate(["Once upon a", "There was"]).generations), 2)


@check("OpenAIEmbeddings with check_embedding_ctx_length=False: embed_documents, aembed_query")
async def embeddings(site: Site) -> None:
    made = OpenAIEmbeddings(
        model=site.embedder, base_url=site.url, api_key="none", check_embedding_ctx_length=False, max_retries=0
    )
    same_rows(made.embed_documents(TEXTS), site.rows)
    same_rows([await made.aembed_query(TEXTS[0])], site.rows[:1])


if __name__ == "__main__":
    main("langchain-openai")
