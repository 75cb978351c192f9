"""An Airflow DAG that answers a file of questions as one batch. A retried task finds the batch that it made before."""

import json
import os
from datetime import timedelta

from airflow.sdk import PokeReturnValue, dag, get_current_context, task
from airflow.sdk.exceptions import AirflowFailException
from openai import OpenAI

URL = os.environ.get("HEADRACE_URL", "http://127.0.0.1:8000")
MODEL = os.environ.get("MODEL", "smollm2-135m-instruct")
QUESTIONS = {"river": "Name a river.", "lake": "Name a lake.", "sea": "Name a sea."}


def client() -> OpenAI:
    # The SDK would repeat a lost `POST` by itself. Here Airflow does, after it has looked for the batch.
    return OpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("HEADRACE_API_KEY", "none"), max_retries=0)


def line(name: str, question: str) -> str:
    body = {"model": MODEL, "messages": [{"role": "user", "content": question}], "max_tokens": 16}
    return json.dumps({"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body})


@dag(schedule=None, catchup=False, default_args={"retries": 3, "retry_delay": timedelta(seconds=30)})
def answer_questions():
    @task
    def start() -> str:
        """Return the id of this run's batch. Its metadata name the run, so a retry does not make a second one."""
        context, service = get_current_context(), client()
        run = {"dag_id": context["dag"].dag_id, "run_id": context["run_id"]}
        began = context["dag_run"].run_after.timestamp()  # `start_date` would change if the run is cleared
        for batch in service.batches.list(limit=100):  # newest first; the SDK reads page after page
            if batch.metadata == run:
                return batch.id
            if batch.created_at < began - 60:  # seconds: the clocks of two machines differ
                break
        questions = "\n".join(line(*pair) for pair in QUESTIONS.items()).encode()
        file = service.files.create(file=("questions.jsonl", questions), purpose="batch")
        return service.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata=run
        ).id

    @task.sensor(mode="reschedule", poke_interval=60, timeout=24 * 3600)
    def wait(batch_id: str) -> PokeReturnValue:
        """Look once a minute. Between two looks the task takes no slot of a worker."""
        batch = client().batches.retrieve(batch_id)
        if batch.status in ("failed", "expired", "cancelled"):
            raise AirflowFailException(f"the batch {batch_id} is {batch.status}: {batch.errors}")
        return PokeReturnValue(batch.status == "completed", batch_id)

    @task
    def collect(batch_id: str) -> dict[str, str]:
        service = client()
        batch = service.batches.retrieve(batch_id)
        if batch.error_file_id is not None:  # the lines that were refused or failed
            raise AirflowFailException(service.files.content(batch.error_file_id).text)
        answers = map(json.loads, service.files.content(batch.output_file_id).text.splitlines())
        return {each["custom_id"]: each["response"]["body"]["choices"][0]["message"]["content"] for each in answers}

    collect(wait(start()))


answer_questions()
