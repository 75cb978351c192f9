"""openai for Python: embeddings."""

import base64
import struct

import openai
from checks import TEXTS, Site, check, main, same, same_rows


def client(site: Site) -> openai.OpenAI:
    return openai.OpenAI(base_url=site.url, api_key="none", max_retries=0)


@check("embeddings: a text, texts, token ids; base64 (the default) and float")
def embeddings(site: Site) -> None:
    create = client(site).embeddings.create
    for options in ({}, {"encoding_format": "float"}):
        answer = create(model=site.embedder, input=TEXTS, **options)
        same([each.index for each in answer.data], [0, 1, 2])
        same_rows([each.embedding for each in answer.data], site.rows)
        assert answer.usage.prompt_tokens > len(TEXTS)
    raw = create(model=site.embedder, input=TEXTS[0], encoding_format="base64").data[0].embedding
    same_rows([struct.unpack(f"<{len(site.rows[0])}f", base64.b64decode(raw))], site.rows[:1])
    same(create(model=site.embedder, input=[[5, 6, 7], [8]]).usage.prompt_tokens, 4)


@check("AsyncOpenAI, 600 inputs")
async def many(site: Site) -> None:
    async with openai.AsyncOpenAI(base_url=site.url, api_key="none", max_retries=0) as made:
        answer = await made.embeddings.create(model=site.embedder, input=TEXTS * 200)
    same_rows([each.embedding for each in answer.data[-3:]], site.rows)


@check("errors: too long, dimensions, a model that generates")
def errors(site: Site) -> None:
    for wanted, options in (
        ("input[1]", {"input": ["a", "word " * 900]}),
        (None, {"input": "a", "dimensions": 3}),
        ("model", {"input": "a", "model": site.model}),
    ):
        try:
            client(site).embeddings.create(**{"model": site.embedder, **options})
        except openai.BadRequestError as error:
            same(error.param if wanted else None, wanted)
            continue
        raise AssertionError("no BadRequestError")


if __name__ == "__main__":
    main("openai")
