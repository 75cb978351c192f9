"""Calls beside the steps."""

from headrace_engine.conformance.case import Broken, case, expect
from headrace_engine.conformance.driver import EngineUnderTest
from headrace_engine.errors import EngineDeadError, HeadraceEngineError
from headrace_engine.lora_request import LoRARequest


@case()
def the_tokenizer_is_told(engine: EngineUnderTest) -> None:
    """The call tokenizer gives parts that encode a text and decode it again."""
    text = engine.tokenizer.decode(engine.prompt())  # a small vocabulary may lack some characters
    decoded = engine.tokenizer.decode(engine.tokenizer.encode(text))
    expect(decoded == text and text, f"{text!r} comes back as {decoded!r}")


@case()
def an_unknown_call_is_refused(engine: EngineUnderTest) -> None:
    """A call that the engine does not know is refused, while it is idle and while it computes; it lives on."""
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
    """After the call reset_prefix_cache answers True, a prompt that was cached finds nothing."""
    request = engine.request(engine.prompt(engine.info.max_model_len - 8, 5), max_tokens=1)
    engine.run_one(request)
    try:
        done = engine.call("reset_prefix_cache")
    except HeadraceEngineError as error:
        raise Broken(f"the call is refused: {error}") from error
    expect(done is True, f"the answer is {done!r} while nothing runs, expected True")
    again = engine.run_one(engine.again(request))
    expect(again.num_cached_tokens == 0, f"{again.num_cached_tokens} tokens are cached behind the reset")


def _expect_refused(engine: EngineUnderTest, method: str, *args: object) -> None:
    try:
        answer = engine.call(method, *args)
    except EngineDeadError:
        raise
    except HeadraceEngineError as error:
        expect(str(error), f"the refusal of {method} has no sentence")
    else:
        raise Broken(f"the call {method} is answered with {answer!r}")
