"""Runs in the daemon's network: asks the gateway for chats, half of them as streams, and repeats what was cut.

The repeated request has the Idempotency-Key of the first, as the gateway's documentation advises. Prints a line `sent`,
then a line of JSON as celery_requests.py does. Uses the standard library alone.
"""

import http.client
import json
import sys
import threading
import time
import urllib.error
import urllib.request
import uuid


def main() -> None:
    url, key, model, count, tokens, seconds = sys.argv[1:]
    answers: dict[int, dict[str, object]] = {}
    end = time.time() + float(seconds)

    def run(number: int) -> None:
        answers[number] = {"text": None, "error": "no answer", "at": time.time()}
        headers = {
            "Authorization": f"Bearer {key}",
            "Content-Type": "application/json",
            "Idempotency-Key": uuid.uuid4().hex,
        }
        body = {
            "model": model,
            "messages": [{"role": "user", "content": f"Tell a long story about river number {number}."}],
            "max_tokens": int(tokens),
            "temperature": 0,
            "ignore_eos": True,
            "stream": number % 2 == 0,
        }
        while time.time() < end and answers[number]["text"] is None:
            request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
            try:
                with urllib.request.urlopen(request, timeout=60) as response:
                    text = read_stream(response) if body["stream"] else read_chat(response)
                answers[number] = {"text": text, "error": None, "at": time.time()}
            except urllib.error.HTTPError as error:
                answers[number]["error"] = f"{error.code} {error.read()[:300]!r}"
                if error.code not in (409, 429, 500, 502, 503, 504):
                    break
            except (OSError, http.client.HTTPException, EOFError) as error:
                answers[number]["error"] = f"{type(error).__name__}: {error}"
            time.sleep(0.5)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(int(count))]
    for thread in threads:
        thread.start()
    print("sent", flush=True)
    for thread in threads:
        thread.join()
    print(json.dumps(answers), flush=True)


def read_chat(response: http.client.HTTPResponse) -> str:
    return str(json.load(response)["choices"][0]["message"]["content"])


def read_stream(response: http.client.HTTPResponse) -> str:
    text = ""
    for line in response:
        if line == b"data: [DONE]\n":
            return text
        if line.startswith(b"data: "):
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise EOFError(str(chunk["error"])[:300])
            text += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
    raise EOFError("the stream was cut")


main()
