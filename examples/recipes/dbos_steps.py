"""A DBOS workflow whose step rejoins its request: `python dbos_steps.py order-4711 "Name three rivers."`

DBOS runs an unfinished step again, also after the process was killed. The key of the request is that of the step, so
the gateway returns the same answer, and the model computes it once.
"""

import os
import sys

from dbos import DBOS, SetWorkflowID
from openai import APIConnectionError, InternalServerError, OpenAI, RateLimitError

URL = os.environ.get("HEADRACE_URL", "http://127.0.0.1:8000")
MODEL = os.environ.get("MODEL", "smollm2-135m-instruct")

service = OpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("HEADRACE_API_KEY", "none"), max_retries=0)


def may_pass(error: BaseException) -> bool:
    if isinstance(error, (InternalServerError, RateLimitError)):
        return error.response.headers.get("x-should-retry") != "false"  # Headrace has retried it already
    return isinstance(error, APIConnectionError)


@DBOS.step(retries_allowed=True, max_attempts=10, should_retry=may_pass)
def ask(question: str) -> str:
    answer = service.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": question}],
        max_tokens=256,
        extra_headers={
            "Idempotency-Key": f"{DBOS.workflow_id}:{DBOS.step_id}",  # the same in each attempt
            "X-Headrace-Abandon-After": "3600",  # seconds for which the request runs on without a reader
        },
        timeout=600,
    )
    return answer.choices[0].message.content


@DBOS.workflow()
def answer(question: str) -> str:
    return ask(question)


if __name__ == "__main__":
    DBOS(
        config={
            "name": "answers",
            "application_version": "1",  # change it when a workflow's steps change
            "system_database_url": os.environ.get("DATABASE", "sqlite:///answers.sqlite"),
        }
    )
    DBOS.launch()  # continues the workflows that did not end
    name, question = sys.argv[1:]
    with SetWorkflowID(name):  # a name that exists gives that workflow, also one that has ended
        print(DBOS.start_workflow(answer, question).get_result())
    DBOS.destroy()
