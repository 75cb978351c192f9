"""Run the engine without a queue: prompts in, texts out. `pip install '.[worker]'`"""

import os

from headrace_engine import LLM, SamplingParams

# a model folder, or this name, which fetches the default model
MODEL_FOLDER = os.environ.get("MODEL_FOLDER", "smollm2-135m-instruct")

llm = LLM(MODEL_FOLDER, max_num_seqs=8)
params = SamplingParams(temperature=0, max_tokens=8)
for output in llm.generate(["The capital of France is", "The largest river is"], params):
    print(repr(output.prompt + output.outputs[0].text))
llm.close()
