// @ai-sdk/openai-compatible: node with_ai_sdk.mjs URL MODEL, in a folder with the packages; a line of JSON for each check

import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateObject, generateText, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";
import { runChecks } from "./checks.mjs";

const [baseURL, model] = process.argv.slice(2);
const name = "@ai-sdk/openai-compatible";
const settings = { name: "headrace", baseURL, apiKey: "none", includeUsage: true };
const provider = createOpenAICompatible({ ...settings, supportsStructuredOutputs: true });
const common = { model: provider(model), prompt: "Say hello.", temperature: 0, maxRetries: 0 };
const schema = z.object({ colour: z.enum(["red", "green"]) });
const painted = [];
const paint = tool({
  description: "Paints the wall.",
  inputSchema: schema,
  execute: async ({ colour }) => { painted.push(colour); return `it is ${colour}`; },
});

const checks = {
  "generateText, streamText with includeUsage": async () => {
    const options = { ...common, maxOutputTokens: 12 };
    const plain = await generateText(options);
    const streamed = streamText(options);
    let text = "";
    for await (const part of streamed.textStream) text += part;
    assert.ok(text);
    assert.equal(text, plain.text);
    assert.equal(await streamed.finishReason, plain.finishReason);
    assert.equal((await streamed.usage).outputTokens, plain.usage.outputTokens);
    assert.equal((await streamed.usage).inputTokens, plain.usage.inputTokens);
    assert.ok(plain.usage.inputTokens > 0);
  },
  "tools: toolChoice required and by name; streamed; the turn after the call": async () => {
    for (const toolChoice of ["required", { type: "tool", toolName: "paint" }]) {
      const options = { ...common, tools: { paint }, toolChoice, maxOutputTokens: 100 };
      const plain = await generateText(options);
      const streamed = streamText(options);
      await streamed.consumeStream({ onError: (error) => { throw error; } });
      const inputs = (calls) => calls.map((call) => [call.toolName, call.input]);
      assert.ok(plain.toolCalls.length > 0);
      assert.deepEqual(inputs(await streamed.toolCalls), inputs(plain.toolCalls));
    }
    const first = ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "auto" });
    const loop = { ...common, tools: { paint }, prepareStep: first, stopWhen: stepCountIs(2), maxOutputTokens: 100 };
    const { steps } = await generateText(loop);
    assert.equal(steps.length, 2);
    assert.ok(steps[1].text);
    assert.ok(painted.includes("red") || painted.includes("green"));
  },
  "generateObject and streamObject, with and without supportsStructuredOutputs": async () => {
    const options = { ...common, schema, maxOutputTokens: 100 };
    const { object } = await generateObject(options);
    schema.parse(object);
    const streamed = streamObject(options);
    for await (const part of streamed.partialObjectStream) assert.ok(part);
    assert.deepEqual(await streamed.object, object);
    const text = await generateText({ ...common, output: Output.object({ schema }), maxOutputTokens: 100 });
    assert.deepEqual(text.output, object);
    // without supportsStructuredOutputs the SDK asks for any object of JSON, and leaves the schema to the prompt
    const loose = createOpenAICompatible(settings);
    await generateObject({ ...options, model: loose(model), prompt: 'Write {"colour": "red"} as JSON.' });
  },
  "completionModel, streamed": async () => {
    const options = { ...common, model: provider.completionModel(model), prompt: "Once upon a", maxOutputTokens: 8 };
    const plain = await generateText(options);
    assert.ok(plain.text);
    assert.equal(await streamText(options).text, plain.text);
  },
  "an error has its status and its message": async () => {
    const options = { ...common, model: provider("nobody") };
    await assert.rejects(generateText(options), (error) => error.statusCode === 404 && error.message.includes("nobody"));
  },
};

await runChecks(name, name, checks);
