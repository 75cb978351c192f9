"""instructor, on openai-python."""

from typing import Literal

import instructor
import openai
import pydantic
from checks import MESSAGES, Site, check, main


class Answer(pydantic.BaseModel, extra="forbid"):
    colour: Literal["red", "green"]
    happy: bool


def create(site: Site, mode: instructor.Mode, **options):
    client = instructor.from_openai(openai.OpenAI(base_url=site.url, api_key="none", max_retries=0), mode=mode)
    return client, {"model": site.model, "messages": MESSAGES, "max_tokens": 200, "temperature": 0, "max_retries": 0}


def add(mode: instructor.Mode) -> None:
    @check(f"create, Mode.{mode.name}")
    def plain(site: Site) -> None:
        client, options = create(site, mode)
        answer = client.chat.completions.create(response_model=Answer, **options)
        assert isinstance(answer, Answer), answer


for each in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
    add(each)


@check("create_partial")
def partial(site: Site) -> None:
    client, options = create(site, instructor.Mode.TOOLS)
    *_, last = client.chat.completions.create_partial(response_model=Answer, **options)
    Answer.model_validate(last.model_dump())


if __name__ == "__main__":
    main("instructor")
