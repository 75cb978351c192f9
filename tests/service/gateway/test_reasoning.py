"""A model whose template opens a thought, with think tags that are special tokens: the answer is what follows them."""

import json
from collections.abc import Iterator
from typing import Any, Final

import openai
import pytest
from tokenizers import AddedToken

from engine.model_families import VOCAB_SIZE, Family
from engine.tiny_models import save_model, save_tokenizer
from service.gateway.conftest import RunningGateway
from service.gateway.gateway_process import GatewayProcess
from service.servers import make_server
from service.workers.service import Service, results

MESSAGES: Final[list[Any]] = [{"role": "user", "content": "hello"}]
SCHEMA: Final = {
    "type": "object",
    "properties": {"a": {"enum": ["red"]}},
    "required": ["a"],
    "additionalProperties": False,
}
TEMPLATE: Final = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningGateway, dict[str, int]]]:
    """A gateway before such a model, and the bias with which the model ends its thought."""
    folder = tmp_path_factory.mktemp("thinker")
    save_model(Family("llama", options={"vocab_size": VOCAB_SIZE + 2}), folder)
    tokenizer = save_tokenizer(folder)
    tokenizer.add_tokens([AddedToken(tag, special=True) for tag in ("<think>", "</think>")], special_tokens=True)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    with make_server() as server:
        service = Service(server, str(folder), folder)
        replica = GatewayProcess(redis_url=server.url, log=folder / "gateway.log", files=folder / "files")
        try:
            service.start_worker().wait_ready()
            bias = {str(tokenizer.convert_tokens_to_ids("</think>")): 50}
            yield RunningGateway(service, (replica.wait_ready(), replica)), bias
        finally:
            replica.close()
            service.close()


def test_the_grammar_of_every_door_begins_after_the_thought(
    thinker: tuple[RunningGateway, dict[str, int]],
) -> None:
    gateway, bias = thinker
    body: Any = {"logit_bias": bias, "seed": 1}
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        form: Any = {"type": "json_schema", "json_schema": {"name": "paint", "schema": SCHEMA}}
        chat = client.chat.completions.create(
            model=gateway.model, messages=MESSAGES, max_tokens=60, response_format=form, extra_body=body
        )
        text: Any = {"format": {"type": "json_schema", "name": "paint", "schema": SCHEMA}}
        response = client.responses.create(
            model=gateway.model, input="hello", max_output_tokens=60, text=text, extra_body=body
        )
    assert json.loads(chat.choices[0].message.content or "") == {"a": "red"}
    assert json.loads(response.output_text) == {"a": "red"}
    params = {"structured_outputs": {"json": SCHEMA}, "max_tokens": 60, "skip_special_tokens": False, **body}
    handle = gateway.service.send({"messages": MESSAGES, "sampling_params": params})
    _, closing, rest = results([handle], timeout=60)[handle.id]["outputs"][0]["text"].partition("</think>")
    assert (closing, json.loads(rest)) == ("</think>", {"a": "red"})


def test_the_answer_behind_tags_that_are_special_tokens_is_content(
    thinker: tuple[RunningGateway, dict[str, int]],
) -> None:
    gateway, bias = thinker
    # a thought and an answer of one letter, in turns with the closing tag
    body: Any = {"allowed_token_ids": [*map(int, bias), 40], "temperature": 2, "seed": 1, "ignore_eos": True}
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        chat = client.chat.completions.create(model=gateway.model, messages=MESSAGES, max_tokens=40, extra_body=body)
        response = client.responses.create(model=gateway.model, input="hello", max_output_tokens=40, extra_body=body)
        without_tags = client.chat.completions.create(
            model=gateway.model, messages=MESSAGES, max_tokens=40, extra_body={**body, "skip_special_tokens": True}
        )
    assert chat.choices[0].message.content
    assert response.output_text
    assert without_tags.choices[0].message.content
