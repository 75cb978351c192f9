"""How many questions a second: one decision of N questions against N chats that ask them one by one.

Run it against a service that does nothing else: `headrace serve`, then
`python benchmarks/decisions.py --url http://127.0.0.1:8000/v1`. The systems take turns, and each turn has an input that
no turn before had, so that no prefix cache has it. There are three ways to ask by chats:

- `chat, input first`: the chat begins with the input, so that the prefix cache shares it. The answer is one token.
- `chat, question first`: the question comes before the input. The answer is one token.
- `chat, JSON`: as the first, with an answer of JSON by a schema.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import httpx2

WORDS = [
    "river",
    "mill",
    "stone",
    "water",
    "wheel",
    "grain",
    "miller",
    "bridge",
    "field",
    "winter",
    "summer",
    "village",
    "road",
    "market",
    "bread",
]
SCHEMA = {"type": "object", "properties": {"answer": {"type": "boolean"}}, "required": ["answer"]}
JSON_FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
PARALLEL = 100

Send = Callable[[httpx2.AsyncClient, str, str, list[str]], Any]


def statement(number: int) -> str:
    return f"The text mentions {WORDS[number % len(WORDS)]} number {number}."


async def decide(http: httpx2.AsyncClient, model: str, text: str, statements: list[str]) -> int:
    questions = [{"type": "predicate", "instructions": each} for each in statements]
    answer = await post(http, "/decisions", {"model": model, "input": text, "questions": questions})
    assert len(answer["answers"]) == len(statements)
    return int(answer["usage"]["input_tokens"])


async def chats(
    http: httpx2.AsyncClient, model: str, text: str, statements: list[str], *, input_first: bool, as_json: bool
) -> int:
    async def ask(statement: str) -> int:
        question = f"Is this statement about the text true? {statement} Answer true or false."
        content = f"{text}\n\n{question}" if input_first else f"{question}\n\n{text}"
        options: dict[str, Any] = {"max_tokens": 32, "response_format": JSON_FORMAT} if as_json else {"max_tokens": 1}
        body = {"model": model, "messages": [{"role": "user", "content": content}], "temperature": 0, **options}
        answer = await post(http, "/chat/completions", body)
        return int(answer["usage"]["prompt_tokens"])

    return sum(await asyncio.gather(*map(ask, statements)))


async def post(http: httpx2.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


WAYS: dict[str, Send] = {
    "decision": decide,
    "chat, input first": partial(chats, input_first=True, as_json=False),
    "chat, question first": partial(chats, input_first=False, as_json=False),
    "chat, JSON": partial(chats, input_first=True, as_json=True),
}


async def measure(url: str, model: str, words: int, questions: int, turns: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    limits = httpx2.Limits(max_connections=PARALLEL)
    async with httpx2.AsyncClient(base_url=url, timeout=600, limits=limits) as http:
        for turn in range(-1, turns):
            for way, send in WAYS.items():
                text = " ".join(random.Random(f"{time.time_ns()}{way}").choices(WORDS, k=words))
                begun = time.perf_counter()
                tokens = await send(http, model, text, [statement(number) for number in range(questions)])
                took = time.perf_counter() - begun
                print(f"turn {turn:2} {way:22} {took:6.2f} s  {tokens} input tokens", flush=True)
                if turn >= 0:  # the first one warms up
                    seconds[way].append(took)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--words", type=int, default=440, help="words of the input, of about a token each")
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    found = asyncio.run(measure(args.url, args.model, args.words, args.questions, args.turns))
    medians = {way: statistics.median(each) for way, each in found.items()}
    for way, median in medians.items():
        rate, ratio = args.questions / median, median / medians["decision"]
        print(f"{way:22} median {median:6.2f} s  {rate:6.1f} questions/s  {ratio:5.2f} x the decision's time")
    print(json.dumps({way: [round(each, 3) for each in times] for way, times in found.items()}))


if __name__ == "__main__":
    main()
