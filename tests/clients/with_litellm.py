"""litellm, the library."""

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it is fetched when the library is imported

import litellm
import pydantic
from checks import MESSAGES, PAINT, QUERY, TEXTS, Site, check, is_colour, main, same, same_ranking, same_rows

litellm.suppress_debug_info = True  # it is written to stdout
NAMED = {"type": "function", "function": {"name": "paint"}}


def complete(site: Site, **options):
    fixed = {"api_base": site.url, "api_key": "none", "temperature": 0, "max_retries": 0}
    return litellm.completion(**{"model": f"openai/{site.model}", "messages": MESSAGES, **fixed, **options})


@check("completion, streamed with usage")
def stream(site: Site) -> None:
    plain = complete(site, max_tokens=12)
    chunks = list(complete(site, max_tokens=12, stream=True, stream_options={"include_usage": True}))
    built = litellm.stream_chunk_builder(chunks)
    same(built.choices[0].message.content, plain.choices[0].message.content)
    same(built.choices[0].finish_reason, plain.choices[0].finish_reason)
    same(built.usage.completion_tokens, plain.usage.completion_tokens)
    same(built.usage.prompt_tokens, plain.usage.prompt_tokens)


@check("acompletion, streamed")
async def astream(site: Site) -> None:
    fixed = {"api_base": site.url, "api_key": "none", "temperature": 0, "max_tokens": 12}
    answer = await litellm.acompletion(model=f"openai/{site.model}", messages=MESSAGES, stream=True, **fixed)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in answer])
    same(text, complete(site, max_tokens=12).choices[0].message.content)


@check("tools, tool_choice by name and required, streamed; the result goes back")
def tools(site: Site) -> None:
    for choice in (NAMED, "required"):
        options = {"tools": [PAINT], "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 100}
        (call,) = complete(site, **options).choices[0].message.tool_calls
        is_colour(call.function.arguments)
        built = litellm.stream_chunk_builder(list(complete(site, stream=True, **options)))
        (streamed,) = built.choices[0].message.tool_calls
        same((streamed.function.name, streamed.function.arguments), ("paint", call.function.arguments))
    result = {"role": "tool", "tool_call_id": call.id, "content": "done"}
    after = complete(site, messages=[*MESSAGES, built.choices[0].message, result], tools=[PAINT], max_tokens=8)
    assert after.choices[0].message.content


@check("response_format as a pydantic class")
def structured(site: Site) -> None:
    class Answer(pydantic.BaseModel):
        happy: bool

    Answer.model_validate_json(complete(site, response_format=Answer, max_tokens=60).choices[0].message.content)


@check("text_completion with logprobs, streamed")
def text_completion(site: Site) -> None:
    fixed = {"api_base": site.url, "api_key": "none", "temperature": 0, "max_tokens": 8, "prompt": "Once upon a"}
    plain = litellm.text_completion(model=f"text-completion-openai/{site.model}", logprobs=1, **fixed)
    same(len(plain.choices[0].logprobs.token_logprobs), 8)
    chunks = litellm.text_completion(model=f"text-completion-openai/{site.model}", stream=True, **fixed)
    same("".join(chunk.choices[0].text or "" for chunk in chunks), plain.choices[0].text)


@check("errors become litellm's classes")
def errors(site: Site) -> None:
    for wanted, options in (
        (litellm.NotFoundError, {"model": "openai/nobody"}),
        (litellm.BadRequestError, {"temperature": -1}),
        (litellm.ContextWindowExceededError, {"messages": [{"role": "user", "content": "word " * 9000}]}),
    ):
        try:
            complete(site, **options)
        except wanted:
            continue
        raise AssertionError(f"no {wanted.__name__}")


@check("embedding: openai/, hosted_vllm/, cohere/")
def embedding(site: Site) -> None:
    for provider, base in (("openai", site.url), ("hosted_vllm", site.url), ("cohere", f"{site.root}/v2/embed")):
        fixed = {"api_base": base, "api_key": "none", "max_retries": 0}
        answer = litellm.embedding(f"{provider}/{site.embedder}", input=TEXTS, **fixed)
        same_rows([each["embedding"] for each in answer.data], site.rows)


@check("rerank: hosted_vllm/, cohere/, jina_ai/")
def rerank(site: Site) -> None:
    for provider, base in (("hosted_vllm", site.root), ("cohere", site.root), ("jina_ai", site.root)):
        fixed = {"api_base": base, "api_key": "none"}
        answer = litellm.rerank(f"{provider}/{site.reranker}", query=QUERY, documents=TEXTS, **fixed)
        same_ranking([(each["index"], each["relevance_score"]) for each in answer.results], site.ranking)


if __name__ == "__main__":
    main("litellm")
