"""`TokenizerAnswers`: answers tokenizer calls with the code that tokenises requests.

It runs in a preparation process. The body of a call and its answer are msgpack maps; docs/wire.md describes them.
"""

from collections.abc import Mapping
from typing import Any

from headrace_broker.messages import GenerateRequest
from headrace_broker.packing import pack, unpack
from headrace_engine.api.input_processor import InputProcessor
from headrace_engine.text.chat import ChatOptions
from headrace_engine.text.tokenizer import ModelTokenizer
from headrace_monitoring.logging import frames
from headrace_wire.codes import ErrorCode
from headrace_wire.errors import InvalidRequestError
from headrace_wire.request import TOKENS
from headrace_workers.preparation.intake import RefusedError, check_tools, prompt_of


class TokenizerAnswers:
    """Args:
    processor: the input processor of requests.
    tokenizer: the tokenizer that it uses.
    """

    def __init__(self, processor: InputProcessor, tokenizer: ModelTokenizer) -> None:
        self._processor = processor
        self._tokenizer = tokenizer

    def answer(self, kind: str, body: bytes) -> bytes:
        """Return the packed answer: the result, or the error. Never raises."""
        try:
            given = unpack(body)
            result = self._detokenize(given) if kind == "detokenize" else self._tokenize(given, kind)
            return pack({"result": result})
        except RefusedError as refusal:
            return error_answer(refusal.error.code, refusal.error.message)
        except InvalidRequestError as error:
            return error_answer(error.code, str(error))
        except Exception as error:  # noqa: BLE001  # every call gets an answer, which quotes no text of the call
            raised = f"{type(error).__name__} at {' '.join(frames(error).split())}"
            return error_answer(ErrorCode.ENGINE_ERROR, f"the call could not be answered: {raised}")

    def _tokenize(self, given: Mapping[str, Any], kind: str) -> dict[str, Any]:
        request = GenerateRequest.parse(given.get("request") or {})
        adds_special = given.get("add_special_tokens")
        if request.messages is not None:
            check_tools(request, self._processor)
            text, token_ids = self._processor.tokenize_chat(request.messages, ChatOptions(**request.chat_options))
            if adds_special:
                token_ids = self._tokenizer.encode(text)
        elif request.prompt is not None and adds_special is False:
            token_ids = self._tokenizer.encode_plain(request.prompt)
        else:
            _, token_ids = self._processor.tokenize(prompt_of(request, self._processor))
        result = {"count": len(token_ids), "max_model_len": self._processor.model_info.max_model_len}
        if kind == "count":
            return result
        texts = [self._tokenizer.backend.id_to_token(each) or "" for each in token_ids]
        return {**result, "tokens": token_ids, "token_strs": texts if given.get("token_strs") else None}

    def _detokenize(self, given: Mapping[str, Any]) -> dict[str, Any]:
        tokens = given.get("tokens")
        problem = TOKENS.problem("tokens", tokens)
        size = self._processor.model_info.vocab_size
        if problem is None and (beyond := [each for each in tokens or () if each >= size]):
            problem = f"tokens must be below {size}, the size of the vocabulary, got {beyond[0]}"
        if problem is not None:
            raise RefusedError(ErrorCode.INVALID_REQUEST, problem)
        return {"prompt": self._tokenizer.decode(tokens or [])}


def error_answer(code: str, message: str) -> bytes:
    """Return the packed answer to a call that failed."""
    return pack({"error": {"code": code, "message": message}})
