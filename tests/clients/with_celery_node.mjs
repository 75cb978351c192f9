// celery-node: node with_celery_node.mjs URL MODEL FOLDER REDIS EMBEDDER ..., in a folder with the package

import assert from "node:assert/strict";
import celery from "celery-node";
import { runChecks } from "./checks.mjs";

const [url, , , redis, embedder] = process.argv.slice(2);
const input = ["the mill", "a wheel in the water", "river"];
const client = celery.createClient(redis, redis, `headrace.${embedder}`);

const checks = {
  "headrace.embed": async () => {
    const result = await client.sendTask("headrace.embed", [], { input }).get(60000);
    assert.equal(result.error, null);
    const rows = new Float32Array(Uint8Array.from(Buffer.from(result.data.bytes, "base64")).buffer);
    const head = { "Content-Type": "application/json" };
    const body = JSON.stringify({ model: embedder, input });
    const answer = await (await fetch(`${url}/embeddings`, { method: "POST", headers: head, body })).json();
    assert.deepEqual(rows, new Float32Array(answer.data.flatMap(({ embedding }) => embedding)));
    assert.deepEqual(result.data.shape, [3, answer.data[0].embedding.length]);
  },
  "a refusal is in the result": async () => {
    const result = await client.sendTask("headrace.embed", [], { input: ["mill", ""] }).get(60000);
    assert.equal(result.error.code, "invalid_request");
    assert.ok(result.error.message.includes("input[1] must not be empty"));
  },
};

await runChecks("celery-node", "celery-node", checks);
await client.disconnect();
