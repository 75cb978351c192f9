"""Airflow: the DAG in `dag.test()`, on SQLite and without a scheduler, while the reply to its `POST` is lost."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from checks import Site, check, main, same

HOME = Path.cwd() / "airflow"
os.environ |= {
    "AIRFLOW_HOME": str(HOME),
    "AIRFLOW__CORE__DAGS_FOLDER": str(HOME / "dags"),
    "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
    "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "True",
}


def installed_dag() -> Any:
    """Make Airflow's database, put the recipe among its DAGs, and return its DAG."""
    (HOME / "dags").mkdir(parents=True)
    import airflow_batch as recipe

    shutil.copy(recipe.__file__, HOME / "dags")
    subprocess.run([sys.executable, "-m", "airflow", "db", "migrate"], check=True, stdout=sys.stderr)
    dag = recipe.answer_questions()
    for task in dag.tasks:
        task.retry_delay = timedelta(0)
    dag.get_task("wait").poke_interval = 0.5
    return dag


@check("a batch made, awaited and collected; the reply to its creation is lost, and the retry finds it")
def batch(_site: Site) -> None:
    dag = installed_dag()
    import airflow_batch as recipe
    from openai import APIConnectionError
    from openai.resources import Batches

    create, list_, lost = Batches.create, Batches.list, []

    def create_and_lose_reply(self: Batches, **options: Any) -> Any:
        made = create(self, **options)
        if not lost:
            lost.append(made.id)
            raise APIConnectionError(request=None)  # type: ignore[arg-type]
        return made

    def list_with_older(self: Batches, **options: Any) -> Iterator[Any]:
        yield from list_(self, **options)
        yield SimpleNamespace(metadata={}, created_at=0)
        raise AssertionError("the task reads on after a batch that is older than its run")

    with patch.object(Batches, "create", create_and_lose_reply), patch.object(Batches, "list", list_with_older):
        run = dag.test()
    same(str(run.state), "success")
    found = {each.task_id: each for each in run.get_task_instances()}
    same(found["start"].try_number, 2)
    same([each.id for each in recipe.client().batches.list()], lost)
    answers = found["collect"].xcom_pull(task_ids="collect")
    same(answers.keys(), recipe.QUESTIONS.keys())
    assert all(answers.values())


if __name__ == "__main__":
    main("apache-airflow")
