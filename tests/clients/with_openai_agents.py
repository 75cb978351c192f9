"""openai-agents, by its model for chat completions."""

from typing import Literal

import agents
import openai
import pydantic
from checks import Site, check, main, same

agents.set_tracing_disabled(True)  # traces would go to OpenAI


class Answer(pydantic.BaseModel):
    colour: Literal["red", "green"]


painted: list[str] = []


@agents.function_tool
def paint(colour: Literal["red", "green"]) -> str:
    """Paint the wall."""
    painted.append(colour)
    return f"it is {colour}"


def agent(site: Site, **options) -> agents.Agent:
    client = openai.AsyncOpenAI(base_url=site.url, api_key="none", max_retries=0)
    model = agents.OpenAIChatCompletionsModel(model=site.model, openai_client=client)
    settings = agents.ModelSettings(temperature=0, max_tokens=100, **options.pop("settings", {}))
    return agents.Agent(
        name="painter", instructions="You paint walls.", model=model, model_settings=settings, **options
    )


@check("Runner.run, run_streamed with usage")
async def run(site: Site) -> None:
    plain = await agents.Runner.run(agent(site), "Say hello.")
    streamed = agents.Runner.run_streamed(agent(site, settings={"include_usage": True}), "Say hello.")
    async for _ in streamed.stream_events():
        pass
    same(streamed.final_output, plain.final_output)
    same(streamed.context_wrapper.usage.total_tokens, plain.context_wrapper.usage.total_tokens)


@check("a tool that must be called, and the turn after it; streamed too")
async def tools(site: Site) -> None:
    options = {"tools": [paint], "settings": {"tool_choice": "required", "parallel_tool_calls": False}}
    plain = await agents.Runner.run(agent(site, **options), "Paint the wall.", max_turns=2)
    streamed = agents.Runner.run_streamed(agent(site, **options), "Paint the wall.", max_turns=2)
    async for _ in streamed.stream_events():
        pass
    same(len(painted), 2)
    same(streamed.final_output, plain.final_output)


@check("output_type")
async def output_type(site: Site) -> None:
    answer = await agents.Runner.run(agent(site, output_type=Answer), "Say hello.")
    assert isinstance(answer.final_output, Answer), answer


if __name__ == "__main__":
    main("openai-agents")
