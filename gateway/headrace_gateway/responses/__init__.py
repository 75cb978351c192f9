"""OpenAI's Responses API: its endpoints, items, events, and the end of stored and background responses."""
