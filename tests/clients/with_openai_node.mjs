// openai for Node.js: node with_openai_node.mjs URL MODEL ..., in a folder with the package; a line of JSON for each check

import assert from "node:assert/strict";
import OpenAI from "openai";
import { runChecks } from "./checks.mjs";

const [baseURL, , , , embedder] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const input = ["the mill", "a wheel in the water", "river"];

const checks = {
  "embeddings: base64 (the default) and float": async () => {
    const plain = await client.embeddings.create({ model: embedder, input, encoding_format: "float" });
    const decoded = await client.embeddings.create({ model: embedder, input });
    assert.deepEqual(plain.data.map(({ index }) => index), [0, 1, 2]);
    const rows = ({ data }) => data.map(({ embedding }) => [...new Float32Array(embedding)]);
    assert.deepEqual(rows(decoded), rows(plain));
    assert.ok(rows(plain)[0].length > 1);
    assert.ok(plain.usage.prompt_tokens > input.length);
  },
  "an input that is too long is a BadRequestError with its index": async () => {
    const long = client.embeddings.create({ model: embedder, input: ["a", "word ".repeat(900)] });
    await assert.rejects(long, (error) => error instanceof OpenAI.BadRequestError && error.param === "input[1]");
  },
};

await runChecks("openai (Node.js)", "openai", checks);
