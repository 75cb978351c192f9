// openai for Node.js: node with_openai_node.mjs URL MODEL ..., in a folder with the package; a line of JSON for each check

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import OpenAI from "openai";

const [baseURL, , , , embedder] = process.argv.slice(2);
const { version } = JSON.parse(readFileSync("node_modules/openai/package.json", "utf8"));
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

for (const [feature, run] of Object.entries(checks)) {
  let error = null;
  try {
    await run();
  } catch (caught) {
    console.error(caught);
    error = `${caught.name}: ${caught.message}`;
  }
  console.log(JSON.stringify({ client: "openai (Node.js)", version, feature, error }));
}
