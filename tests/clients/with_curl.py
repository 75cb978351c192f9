"""curl, the program."""

import json
import subprocess
from typing import Any

from checks import MESSAGES, Site, check, main, same

JSON = ("-H", "Content-Type: application/json", "-H", "Authorization: Bearer none")


def curl(*arguments: str, given: str = "") -> str:
    command = ["curl", "--silent", "--show-error", "--max-time", "60", *arguments]
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    if done.returncode:
        raise AssertionError(f"curl ended with {done.returncode}: {done.stderr}")
    return done.stdout


def body(site: Site, **fields: Any) -> str:
    return json.dumps({"model": site.model, "messages": MESSAGES, "max_tokens": 12, "temperature": 0, **fields})


@check("a chat, and its stream by -N")
def stream(site: Site) -> None:
    url = f"{site.url}/chat/completions"
    plain = json.loads(curl("--fail", url, *JSON, "-d", body(site)))
    *events, last = curl("--fail", "-N", url, *JSON, "-d", body(site, stream=True)).split("\n\n")[:-1]
    same(last, "data: [DONE]")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    same(text, plain["choices"][0]["message"]["content"])


@check("the models, HEAD and --http1.0, --compressed")
def models(site: Site) -> None:
    for options in ((), ("--http1.0",), ("--compressed",)):
        found = json.loads(curl("--fail", f"{site.url}/models", *options))["data"]
        same({each["id"] for each in found}, {site.model, site.embedder, site.reranker})
    same(curl("--head", "-o", "/dev/null", "-w", "%{http_code}", f"{site.url}/models"), "200")


@check("a body of 2 MB, which curl sends only behind `100 Continue`")
def large(site: Site) -> None:
    fields = body(site, metadata={"a": "b"}, user="u" * 2_000_000)
    url = f"{site.url}/chat/completions"
    answer = curl("--fail", url, *JSON, "-H", "Expect: 100-continue", "-d", "@-", given=fields)
    assert json.loads(answer)["choices"]


@check("errors: their statuses and the shape of the body")
def errors(site: Site) -> None:
    url = f"{site.url}/chat/completions"
    for status, arguments in (
        ("404", [*JSON, "-d", body(site, model="nobody")]),
        ("400", [*JSON, "-d", "{"]),
        ("400", [*JSON, "-d", body(site, temperature=-1)]),
        ("415", ["-d", body(site)]),  # curl says that it is a form
    ):
        text, _, found = curl(url, "-w", "\n%{http_code}", *arguments).rpartition("\n")
        same(found, status)
        same(sorted(json.loads(text)["error"]), ["code", "message", "param", "type"])


if __name__ == "__main__":
    main("curl", installed=curl("--version").split()[1])
