"""Calls that are not requests: the tokenizer, adapters, the prefix cache."""

from headrace_engine.conformance.case import Broken, case, expect
from headrace_engine.conformance.driver import EngineUnderTest
from headrace_engine.errors import EngineDeadError, HeadraceEngineError
from headrace_engine.requests.lora_request import LoRARequest


@case()
def the_tokenizer_is_told(engine: EngineUnderTest) -> None:
    """The call tokenizer returns parts that encode a text and decode it again."""
    text = engine.tokenizer.decode(engine.prompt())  # a small vocabulary may lack some characters
    decoded = engine.tokenizer.decode(engine.tokenizer.encode_plain(text))  # the text has its start token
    expect(decoded == text and text, f"{text!r} comes back as {decoded!r}")


@case()
def an_unknown_call_is_refused(engine: EngineUnderTest) -> None:
    """An unknown call is refused, while the engine is idle and while it computes. The engine continues."""
    for busy in (False, True):
        mate = engine.send(engine.request(max_tokens=30 if busy else 1))
        if busy:
            engine.await_first_tokens(mate)
        _expect_refused(engine, "no_such_call", 1, "two")
        engine.finish(mate)


@case()
def adapters_are_refused_where_none_are_served(engine: EngineUnderTest) -> None:
    """Without enable_lora the call add_lora is refused."""
    _expect_refused(engine, "add_lora", LoRARequest("nobody", 1, "/nonexistent").to_wire())


@case()
def the_prefix_cache_can_be_reset(engine: EngineUnderTest) -> None:
    """After reset_prefix_cache has returned True, a cached prompt finds no cached tokens."""
    request = engine.request(engine.prompt(engine.info.max_model_len - 8, 5), max_tokens=1)
    engine.run_one(request)
    try:
        done = engine.call("reset_prefix_cache")
    except HeadraceEngineError as error:
        raise Broken(f"the call is refused: {error}") from error
    expect(done is True, f"the answer is {done!r} while nothing runs, expected True")
    again = engine.run_one(engine.again(request))
    expect(again.num_cached_tokens == 0, f"{again.num_cached_tokens} tokens are cached after the reset")


def _expect_refused(engine: EngineUnderTest, method: str, *args: object) -> None:
    try:
        answer = engine.call(method, *args)
    except EngineDeadError:
        raise
    except HeadraceEngineError as error:
        expect(str(error), f"the refusal of {method} has no message")
    else:
        raise Broken(f"the call {method} returns {answer!r}")
