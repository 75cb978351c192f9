"""OpenAI's chat completions, and the rules of messages and tools, which the other chat APIs use too."""
