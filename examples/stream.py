"""Follow several streams at once with the async client, and rejoin each where it was left: `pip install .`"""

import asyncio
import os

from headrace_broker import AsyncClient

URL = os.environ.get("HEADRACE_REDIS_URL", "redis://127.0.0.1:6379/0")
MODEL = os.environ.get("MODEL", "smollm2-135m-instruct")
PROMPTS = ["A river is", "A lake is", "The sea is"]


async def follow(client: AsyncClient, prompt: str) -> str:
    """Read a stream to its second chunk, leave it, and come back where it was left."""
    request_id = await client.submit(prompt=prompt, sampling_params={"max_tokens": 16, "seed": 7})
    text, last_id = "", "0-0"
    async for chunk in client.stream(request_id):
        text, last_id = text + chunk.text, chunk.entry_id
        break
    async for chunk in client.stream(request_id, last_id=last_id):
        text += chunk.text
    whole = await client.result(request_id)
    assert text == whole.outputs[0].text, "a token is missing or came twice"
    return f"{prompt}{text}"


async def main() -> None:
    async with AsyncClient(URL, model=MODEL) as client:
        for answer in await asyncio.gather(*(follow(client, prompt) for prompt in PROMPTS)):
            print(repr(answer))


asyncio.run(main())
