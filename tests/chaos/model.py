"""The harness's model: tiny and random, but with positions enough for long outputs."""

import json
from pathlib import Path

from engine.tiny_models import save_model, save_tokenizer

MAX_MODEL_LEN = 2048


def save_chaos_model(folder: Path, family: str = "llama") -> str:
    """A random model of three layers; rotary positions let it be long without more weights."""
    folder.mkdir(parents=True, exist_ok=True)
    save_model(family, folder)
    save_tokenizer(folder)
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": MAX_MODEL_LEN}))
    return str(folder)
