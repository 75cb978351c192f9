"""Vercel's @ai-sdk/anthropic on a real gateway: text, a stream, and a call with the turn after it."""

from pathlib import Path

import pytest

from service.gateway import node
from service.gateway.conftest import RunningGateway

pytestmark = pytest.mark.rotated_file

PACKAGES = ("ai@6.0.326", "@ai-sdk/anthropic@3.0.140", "zod@4")  # the next major release wants Node.js 22

PROGRAM = """
import { createAnthropic } from "@ai-sdk/anthropic";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
const [url, model] = process.argv.slice(2);
const provider = createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" });
const common = { model: provider(model), prompt: "hello", temperature: 0, maxRetries: 0 };
const out = {};
out.text = (await generateText({ ...common, maxOutputTokens: 8 })).text;
const streamed = streamText({ ...common, maxOutputTokens: 8, onError: ({ error }) => { throw error; } });
out.streamed = await streamed.text;
const paint = tool({
  inputSchema: z.object({ colour: z.enum(["red", "green"]) }),
  execute: async ({ colour }) => { out.painted = colour; return "done"; },
});
const named = { type: "tool", toolName: "paint" };
const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? named : "none" });
const loop = { ...common, tools: { paint }, prepareStep, stopWhen: stepCountIs(2), maxOutputTokens: 100 };
out.steps = (await generateText(loop)).steps.length;
console.log(JSON.stringify(out));
"""


def test_vercels_provider_reads_what_the_gateway_writes(gateway: RunningGateway, tmp_path: Path) -> None:
    out = node.run(node.install(tmp_path, *PACKAGES), PROGRAM, gateway.url, gateway.model)
    assert out["text"] == out["streamed"]
    assert out["painted"] in ("red", "green")
    assert out["steps"] == 2
