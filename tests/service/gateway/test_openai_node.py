"""openai-node on a real gateway: chats, the stream helper, runTools, completions, responses and its exceptions."""

from pathlib import Path

import pytest

from service.gateway import node
from service.gateway.conftest import RunningGateway

pytestmark = pytest.mark.rotated_file

PACKAGE = "openai@6.49.0"  # the next major release wants Node.js 22

PROGRAM = """
import OpenAI from "openai";
const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "hello" }];
const plain = { model, messages, max_tokens: 8, temperature: 0 };
const out = {};

out.models = (await client.models.list()).data.map((each) => each.id);
out.model = (await client.models.retrieve(model)).id;
out.content = (await client.chat.completions.create(plain)).choices[0].message.content;

const stream = client.chat.completions.stream({ ...plain, stream_options: { include_usage: true } });
out.deltas = 0;
stream.on("content", () => { out.deltas += 1; });
const final = await stream.finalChatCompletion();
out.streamed = final.choices[0].message.content;
out.usage = final.usage.completion_tokens;

const paint = {
  type: "function",
  function: {
    name: "paint",
    description: "Paints.",
    parse: JSON.parse,
    function: ({ colour }) => { out.painted = colour; return "done"; },
    parameters: {
      type: "object",
      properties: { colour: { enum: ["red", "green"] } },
      required: ["colour"],
      additionalProperties: false,
    },
  },
};
const tool_choice = { type: "function", function: { name: "paint" } };
const tools = { model, messages, tools: [paint], tool_choice, max_tokens: 100 };
await client.chat.completions.runTools(tools).done();
out.paintedPlain = out.painted;
out.painted = undefined;
await client.chat.completions.runTools({ ...tools, stream: true }).done();

const echo = { model, prompt: "hello world", max_tokens: 2, echo: true, logprobs: 1, allowed_token_ids: [7] };
const completion = await client.completions.create(echo);
out.echo = completion.choices[0].text;
out.tokens = completion.choices[0].logprobs.tokens.join("");

const ask = { model, input: "hello", max_output_tokens: 16, temperature: 0 };
const response = await client.responses.create(ask);
out.response = response.output_text;
const events = client.responses.stream(ask);
out.numbers = [];
for await (const event of events) out.numbers.push(event.sequence_number);
out.responseStreamed = (await events.finalResponse()).output_text;
const background = await client.responses.create({ ...ask, background: true, previous_response_id: response.id });
out.rejoined = [];
for await (const event of await client.responses.retrieve(background.id, { stream: true, starting_after: 1 })) {
  out.rejoined.push(event.sequence_number);
}
out.items = (await client.responses.inputItems.list(background.id)).data.map((item) => item.type);
const long = await client.responses.create({ ...ask, background: true, max_output_tokens: 1000 });
out.cancelled = (await client.responses.cancel(long.id)).id === long.id;
await client.responses.delete(background.id);
try {
  await client.batches.cancel("batch_0");
} catch (error) {
  out.batch = error.status;
}

out.errors = [];
for (const fault of [{ model: "nobody" }, { temperature: -1 }, { max_token: 1 }]) {
  try {
    await client.chat.completions.create({ ...plain, ...fault });
  } catch (error) {
    out.errors.push([error.constructor.name, error.status, error.code, error.param]);
  }
}
console.log(JSON.stringify(out));
"""


def test_all_features_of_the_node_sdk_work(gateway: RunningGateway, tmp_path: Path) -> None:
    out = node.run(node.install(tmp_path, PACKAGE), PROGRAM, gateway.url, gateway.model)
    assert out["models"] == [out["model"]] == [gateway.model]
    assert out["content"] == out["streamed"]
    assert out["deltas"] > 0
    assert 0 < out["usage"] <= 8
    assert out["paintedPlain"] in ("red", "green")
    assert out["painted"] in ("red", "green")
    assert out["echo"].startswith("hello world")
    assert out["echo"] == out["tokens"]
    assert out["response"] == out["responseStreamed"]
    assert out["numbers"] == list(range(len(out["numbers"])))
    assert out["rejoined"] == list(range(2, 2 + len(out["rejoined"])))
    assert out["items"] == ["message"]
    assert out["cancelled"] is True  # a POST without a body and its type
    assert out["batch"] == 404
    assert out["errors"] == [
        ["NotFoundError", 404, "model_not_found", "model"],
        ["BadRequestError", 400, "invalid_request", "temperature"],
        ["BadRequestError", 400, "unsupported_parameter", "max_token"],
    ]
