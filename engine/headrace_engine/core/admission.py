"""Takes each new request through the stages before the scheduler.

    add --> wait for the LoRA adapter --> wait for the grammar --> scheduler
             |                             |                        |
             +-----------------------------+------------------------+--> refused

Every stage may refuse a request. A refused request gets an output although no step of the model has computed it.
Adapters are loaded and grammars are compiled in other threads, so that other requests continue. Imports no torch.
"""

from collections.abc import Iterable

from headrace_engine.core.grammars import GrammarPreparation
from headrace_engine.core.lora_manager import LoRAManager
from headrace_engine.core.outputs import EngineCoreOutput
from headrace_engine.core.scheduler import Scheduler
from headrace_engine.core.stop_check import check_stop
from headrace_engine.errors import EngineFullError, HeadraceEngineError
from headrace_engine.grammar.grammar import Grammar
from headrace_engine.requests.request import EngineCoreRequest, FinishReason, LoRAVersion, Request

NO_LORA = "this engine serves no LoRA adapters: enable_lora is not set"

# A step with nothing to compute waits this long for a grammar. Then the step loop looks for new requests again.
_GRAMMAR_WAIT_SECONDS = 0.02


class CoreAdmission:
    """Passes requests on to the scheduler. Only the thread of the step loop may call the methods.

    Args:
        loras: None if the engine serves no adapters.
    """

    def __init__(
        self, scheduler: Scheduler, loras: LoRAManager | None, grammars: GrammarPreparation, max_model_len: int
    ) -> None:
        self._scheduler = scheduler
        self._loras = loras
        self._grammars = grammars
        self._max_model_len = max_model_len
        self._outputs: list[EngineCoreOutput] = []
        """Outputs of requests that were refused, or were complete when they arrived."""

    def add(self, message: EngineCoreRequest) -> None:
        """Pass a request on to the scheduler, or to the stage where it must wait.

        `take_outputs` returns the output of a request that is refused or already complete.
        """
        if message.lora_request is None:
            self._add_with_adapter(message, None)
        elif self._loras is None:
            self._refuse(message, NO_LORA)
        elif self._may_wait(message) and (lora := self._loras.take(message)) is not None:
            self._add_with_adapter(message, lora)

    def admit_ready(self) -> None:
        """Pass on the requests whose adapter is loaded or whose grammar is compiled."""
        if self._loras is not None and self._loras.may_be_ready:
            for message, found in self._loras.ready():
                if isinstance(found, str):
                    self._refuse(message, found)
                else:
                    self._add_with_adapter(message, found)
        if self._grammars:
            idle = not self._outputs and not self._scheduler.has_work()
            for prepared in self._grammars.take(_GRAMMAR_WAIT_SECONDS if idle else 0.0):
                if prepared.error is None:
                    self._schedule(prepared.request, prepared.grammar)
                else:
                    self._refuse(_without_adapter(prepared.request), prepared.error)

    def prepare_again(self, requests: Iterable[tuple[Request, Grammar]]) -> None:
        """Compile new grammars for requests that left the scheduler because their grammars failed."""
        for request, failed in requests:
            self._grammars.add(request, failed)

    def abort(self, request_ids: Iterable[str]) -> None:
        request_ids = list(request_ids)
        if self._loras is not None:
            self._loras.abort(request_ids)
        for request in self._grammars.abort(request_ids):
            request.release_lora()
        for request_id in request_ids:
            self._scheduler.queue_limits.leave(request_id)

    def has_work(self) -> bool:
        """Whether the next step has a request to pass on, a grammar to wait for, or an output to return."""
        if self._loras is not None and self._loras.may_be_ready:
            return True
        return bool(self._outputs or self._grammars)

    def take_outputs(self) -> list[EngineCoreOutput]:
        """Return each output of a refused or already complete request once."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def waiting_ids(self) -> list[str]:
        """Return the ids of the new requests that wait for an adapter or a grammar."""
        return [*self._grammars.waiting_ids(), *(self._loras.waiting_ids() if self._loras is not None else ())]

    def _add_with_adapter(self, message: EngineCoreRequest, lora: LoRAVersion | None) -> None:
        request = Request(message, self._scheduler.kv.block_size, lora)
        output = EngineCoreOutput(request_id=request.request_id, new_token_ids=[])
        if message.output_token_ids:
            # An earlier attempt may have died after it emitted the last token, and before it reported the end.
            output.finish_reason, output.stop_reason = check_stop(request, self._max_model_len)
        if output.finish_reason is not None:
            self._scheduler.queue_limits.leave(_without_adapter(request).request_id)
            self._outputs.append(output)
        elif message.sampling_params.structured_outputs is None:
            self._schedule(request)
        elif self._may_wait(message):
            self._grammars.add(request)

    def _may_wait(self, message: EngineCoreRequest) -> bool:
        """Count a request as waiting before it reaches the scheduler. Return False if it was refused."""
        try:
            limits = self._scheduler.queue_limits
            limits.enter(message.request_id, len(message.prompt_token_ids) + len(message.output_token_ids))
        except EngineFullError as error:
            self._refuse(message, str(error))
            return False
        return True

    def _schedule(self, request: Request, grammar: Grammar | None = None) -> None:
        try:
            self._scheduler.add_request(request, grammar)
        except HeadraceEngineError as error:
            self._refuse(_without_adapter(request), str(error))

    def _refuse(self, message: EngineCoreRequest | Request, reason: str) -> None:
        refusal = EngineCoreOutput(request_id=message.request_id, new_token_ids=[], error=reason)
        refusal.finish_reason = FinishReason.ERROR
        if message.request_id not in self._scheduler.requests:  # otherwise an earlier request with this id waits
            self._scheduler.queue_limits.leave(message.request_id)
        self._outputs.append(refusal)


def _without_adapter(request: Request) -> Request:
    request.release_lora()
    return request
