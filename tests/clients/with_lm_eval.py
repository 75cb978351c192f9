"""lm-eval on a task of its own: local-completions sends token ids and wants them echoed with log-probabilities."""

import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import Site, check, main, same

_CHOOSE = {
    "task": "choose",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{answers}}",
    "doc_to_target": 0,
    "metric_list": [{"metric": "acc"}],
}
_GENERATE = {
    "task": "generate",
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{answers[0]}}",
    "generation_kwargs": {"until": ["\n", "."], "max_gen_toks": 8},
    "metric_list": [{"metric": "exact_match"}],
}
_PERPLEXITY = {
    "task": "perplexity",
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{question}}",
    "metric_list": [{"metric": "word_perplexity"}],
}
_DOCUMENTS = [
    {"question": "The capital of France is", "answers": ["Paris", "a small green table"]},
    {"question": "Two and two are", "answers": ["four", "Wednesday morning"]},
    {"question": "Fire is hot, and ice is", "answers": ["cold", "parliament of the"]},
]


def evaluated(
    site: Site, task: dict[str, object], model: str, path: str, *arguments: str, concurrent: int = 1
) -> list[dict]:
    """The samples that lm_eval logs."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "documents.jsonl").write_text("\n".join(map(json.dumps, _DOCUMENTS)))
        files = {"test": str(folder / "documents.jsonl")}
        data = {"dataset_path": "json", "dataset_kwargs": {"data_files": files}, "test_split": "test"}
        (folder / "task.yaml").write_text(json.dumps({**task, **data}))  # JSON is YAML
        given = [f"model={site.model}", f"base_url={site.url}/{path}", "tokenizer_backend=huggingface"]
        given += [f"tokenizer={site.model_folder}", "max_retries=1", f"num_concurrent={concurrent}"]
        command = [Path(sys.executable).with_name("lm_eval"), "run", "--model", model, "--model_args", ",".join(given)]
        command += ["--tasks", str(task["task"]), "--include_path", str(folder), "--log_samples"]
        command += ["--output_path", str(folder / "out"), *arguments]
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hf")}
        environ = {**os.environ, **offline, "OPENAI_API_KEY": "none"}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            raise AssertionError(done.stderr[-3000:])
        (samples,) = (folder / "out").rglob("samples_*.jsonl")
        return [json.loads(line) for line in samples.read_text().splitlines()]


@check("local-completions: log-likelihoods of token ids, one by one, and in concurrent batches")
def log_likelihoods(site: Site) -> None:
    one = evaluated(site, _CHOOSE, "local-completions", "completions")
    four = evaluated(site, _CHOOSE, "local-completions", "completions", "--batch_size", "2", concurrent=2)
    same([sample["acc"] for sample in one], [1.0] * len(_DOCUMENTS))
    (paris, greedy), _ = one[0]["filtered_resps"]
    assert math.isclose(float(paris), -0.27, abs_tol=0.1), paris  # as transformers says in bfloat16
    same(greedy, "True")
    for left, right in zip(one, four, strict=True):
        for (a, greedy), (b, also) in zip(left["filtered_resps"], right["filtered_resps"], strict=True):
            assert math.isclose(float(a), float(b), abs_tol=0.05), (a, b)
            same(greedy, also)


@check("local-completions: perplexity of whole texts")
def perplexity(site: Site) -> None:
    for sample in evaluated(site, _PERPLEXITY, "local-completions", "completions"):
        (log_likelihood,) = sample["filtered_resps"]
        assert -100 < float(log_likelihood) < 0, sample


@check("local-completions: generate_until")
def completions(site: Site) -> None:
    for sample in evaluated(site, _GENERATE, "local-completions", "completions"):
        (text,) = sample["filtered_resps"]
        assert text.strip(), sample
        assert "\n" not in text, text


@check("local-chat-completions: generate_until")
def chat(site: Site) -> None:
    for sample in evaluated(site, _GENERATE, "local-chat-completions", "chat/completions", "--apply_chat_template"):
        (text,) = sample["filtered_resps"]
        assert text.strip(), sample


if __name__ == "__main__":
    main("lm-eval")
