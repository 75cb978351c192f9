"""The tokenizer that is made from the parts that the core sends is equal to that of transformers."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from tokenizers.normalizers import Normalizer
from transformers import AutoTokenizer, BertTokenizer, LlamaTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

from engine.test_quantised_weights import write_gguf
from engine.tiny_models import CHAT_TEMPLATE, load_model_tokenizer, save_tokenizer
from headrace_engine.checkpoints.checkpoint import pretrained_source
from headrace_engine.errors import InvalidRequestError, ModelLoadError
from headrace_engine.text.tokenizer_loader import parts_of, read_tokenizer

TEXTS = [
    "",
    "The mill wheel",
    "  two  spaces\n\tand a tab ",
    "Größe, 東京, 🙂 12345",
    "<bos>The <eos> wheel<extra>turns <pad>",
    "e\u0301 \u00e9 \ufb01 \u200b \x00",
]
CHAT = [
    {"role": "system", "content": "Be <eos> brief."},
    {"role": "user", "content": " Größe? ", "name": None},
    {"role": "assistant", "content": "{{ 7 * 7 }} & <b>", "reasoning": "so"},
    {"role": "user", "content": ""},
]
TEMPLATE = (
    "{{ bos_token }}{%- for message in messages %}\n"
    "    {%- set shown = namespace(name=message.name | default('nobody')) %}\n"
    "    {%- if message.role == 'none' %}{% continue %}{% endif %}\n"
    "{% generation %}[{{ message.role }}/{{ shown.name }}] {{ message | tojson }}{% endgeneration %}{{ eos_token }}\n"
    "{%- endfor %}{% if tools %}no{% endif %}{{ pad_token }}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def plain(folder: Path, **options: Any) -> None:
    """The tests' own byte-level BPE, with a token that a configuration adds."""
    save_tokenizer(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, **options)
    tokenizer.add_tokens([AddedToken("<extra>", lstrip=True, rstrip=True), AddedToken("wheel", single_word=True)])
    tokenizer.save_pretrained(folder)


def padded_and_cut(folder: Path) -> None:
    plain(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=16)
    tokenizer.save(str(folder / "tokenizer.json"))


def split(folder: Path) -> None:
    """Special tokens in a text are plain text."""
    plain(folder, split_special_tokens=True)


def qwen(folder: Path) -> None:
    """A class of its own, which builds the tokenizer from the vocabulary of `tokenizer.json`."""
    save_tokenizer(folder)
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    Qwen2Tokenizer(vocab=model["vocab"], merges=merges, chat_template=TEMPLATE, bos_token="<bos>").save_pretrained(
        folder
    )


def llama(folder: Path) -> None:
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, "▁": 3, "▁T": 4, "T": 5, "h": 6, "e": 7, "▁w": 8, "w": 9}
    vocabulary |= {f"<0x{byte:02X}>": 10 + byte for byte in range(256)}
    merges = [("▁", "T"), ("▁", "w")]
    LlamaTokenizer(vocab=vocabulary, merges=merges, add_bos_token=True, chat_template=TEMPLATE).save_pretrained(folder)


def bert(folder: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "mill", "wheel", "##s", "t", "##u"]
    BertTokenizer(vocab={word: number for number, word in enumerate(words)}).save_pretrained(folder)


def words(folder: Path) -> None:
    """Two templates, one of them the default."""
    tokenizer = Tokenizer(models.WordLevel({"The": 0, "mill": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?", pad_token="?")
    fast.chat_template = {"default": CHAT_TEMPLATE, "tool_use": "tools"}
    fast.save_pretrained(folder)


KINDS: list[Callable[[Path], object]] = [plain, padded_and_cut, split, qwen, llama, bert, words, write_gguf]


@pytest.mark.parametrize("save", KINDS)
def test_a_tokenizer_made_of_its_parts_does_what_transformers_does(save: Callable[[Path], Any], tmp_path: Path) -> None:
    folder = str(save(tmp_path) or tmp_path)
    source, options = pretrained_source(folder)
    own, reference = load_model_tokenizer(folder), AutoTokenizer.from_pretrained(source, **options)
    assert type(own).__name__ == "ModelTokenizer"
    for text in TEXTS:
        assert own.encode(text) == reference(text, add_special_tokens=True)["input_ids"], text
        assert own.encode_plain(text) == reference(text, add_special_tokens=False)["input_ids"], text
    ids = list(range(len(reference)))
    assert own.decode(ids) == reference.backend_tokenizer.decode(ids, skip_special_tokens=False)
    if reference.chat_template is None:
        with pytest.raises(InvalidRequestError, match="no chat template"):
            own.encode_chat(CHAT)
    else:
        chat = reference.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
        assert own.encode_chat(CHAT) == (chat, reference(chat, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("content", [None, "{}", '{"version": "1.0", "model": {"type": "BPE", "voc'])
def test_a_folder_without_a_usable_tokenizer_is_refused_by_name(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        plain(tmp_path)
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelLoadError, match=str(tmp_path)):
        load_model_tokenizer(str(tmp_path))


def test_a_tokenizer_with_a_step_in_python_is_refused_by_name() -> None:
    class Step:
        def normalize(self, text: Any) -> None: ...

    fast = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    fast.backend_tokenizer.normalizer = Normalizer.custom(Step())
    with pytest.raises(ModelLoadError, match="TokenizersBackend cannot be had as JSON"):
        parts_of(fast)


@pytest.fixture
def _forgets_modules_of_checkpoints() -> Iterator[None]:
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("transformers_modules"):
            del sys.modules[name]


@pytest.mark.usefixtures("_forgets_modules_of_checkpoints")
def test_a_class_that_encodes_in_a_way_of_its_own_is_used_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    folder = tmp_path / "model"
    save_tokenizer(folder)
    (folder / "loud.py").write_text(
        "from transformers import PreTrainedTokenizerFast\n"
        "class Loud(PreTrainedTokenizerFast):\n"
        "    def __call__(self, text, **options): return super().__call__(text.upper(), **options)\n"
    )
    path = folder / "tokenizer_config.json"
    loud = {"tokenizer_class": "Loud", "auto_map": {"AutoTokenizer": ["loud.Loud", "loud.Loud"]}}
    path.write_text(json.dumps(json.loads(path.read_text()) | loud))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    own = load_model_tokenizer(str(folder), trust_remote_code=True)
    assert own.decode(own.encode("quiet")) == "QUIET"
    assert own.decode(own.encode_chat([{"role": "user", "content": "quiet"}])[1]) == "<|USER|>QUIET<EOS><|ASSISTANT|>"


def test_a_process_that_has_the_parts_imports_no_torch(tmp_path: Path) -> None:
    plain(tmp_path)
    parts = asdict(parts_of(read_tokenizer(str(tmp_path), trust_remote_code=False)))
    parts["tokenizer_json"] = parts["tokenizer_json"].decode()
    program = """if True:
        import json, sys
        import headrace_workers.app, headrace_workers.celery.bootsteps
        from headrace_engine.text.tokenizer_factory import create_tokenizer
        from headrace_engine.text.tokenizer_parts import TokenizerParts
        before = "transformers" in sys.modules
        parts = json.load(sys.stdin)
        parts["tokenizer_json"] = parts["tokenizer_json"].encode()
        tokenizer = create_tokenizer("", TokenizerParts(**parts))
        text, ids = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
        print(json.dumps([tokenizer.decode(ids) == text, before, "torch" in sys.modules]))
    """
    done = subprocess.run([sys.executable, "-c", program], input=json.dumps(parts), capture_output=True, text=True)
    assert done.stdout.strip() == "[true, false, false]", done.stderr


def test_a_folder_without_tokenizer_json_says_which_package_or_file_it_needs(tmp_path: Path) -> None:
    plain(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')

    def advice() -> str:
        with pytest.raises(ModelLoadError) as refused:
            read_tokenizer(str(tmp_path), trust_remote_code=False)
        return str(refused.value)

    file = "copy tokenizer.json from the model's repository"
    assert advice().endswith(f"has no usable tokenizer: it has no tokenizer.json: {file}, if it has one")
    (tmp_path / "tekken.json").write_text('{"config": {}, "vocab": []}')
    assert f"its tekken.json cannot be converted (KeyError: 'pattern'): {file}" in advice()
    (tmp_path / "tekken.json").unlink()
    for package, content in (("sentencepiece", b"\n\x0e\n\x05<unk>\x15"), ("tiktoken", b"AA== 0\nAQ== 1\n")):
        (tmp_path / "tokenizer.model").write_bytes(content)
        if importlib.util.find_spec(package) is None:
            assert f"is converted by {package}: {sys.executable} -m pip install {package}, or {file}" in advice()
        assert "tokenizer.model" in advice()
