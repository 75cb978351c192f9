"""`IdempotencyKeys`: let a client repeat a submission that may have been lost, without a second request.

A key is bound to a request id before the request is sent, and marked as sent afterwards. If a client finds a key that
is bound but not marked, it sends the request again under the same id. The queue may then have two messages of the
request, but a worker generates it once.
"""

import hashlib
import json
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any, Final

import redis

from headrace_broker.client.submission import Submission
from headrace_broker.decisions import DecideRequest
from headrace_broker.errors import InvalidRequestError, UsedRequestIdError
from headrace_broker.keys import IDEMPOTENCY_SECONDS, idempotency_key
from headrace_broker.messages import GenerateRequest
from headrace_broker.pooling_messages import PoolingRequest
from headrace_broker.scripts import script

_CLAIM: Final = script("idempotency_claim")


class IdempotencyKeys:
    """The keys of one Redis database, each bound to a model, a tenant and a content. Redis's errors pass through."""

    def __init__(self, client: "redis.Redis") -> None:
        self._client: Final = client
        self._claim: Final = _CLAIM.bound(client)

    def bind(
        self, submissions: Iterable[Submission], used_ids: Collection[str] = ()
    ) -> tuple[list[str], list[Submission]]:
        """Return the request id of each submission, and the submissions that must be sent.

        `used_ids`: ids of these submissions that already belong to a request. Raises UsedRequestIdError for a
        submission with such an id, unless its key is bound. Raises InvalidRequestError for a key that was used with
        another prompt or other sampling parameters.
        """
        request_ids: list[str] = []
        to_send: list[Submission] = []
        bound: set[str] = set()
        for submission in submissions:
            has_key = "idempotency_key" in submission.headers
            if submission.request_id in used_ids and not (has_key and self._client.exists(_redis_key(submission))):
                raise UsedRequestIdError(submission.request_id)
            if not has_key:
                request_ids.append(submission.request_id)
                to_send.append(submission)
                continue
            request_id, was_sent = self._bind(submission)
            request_ids.append(request_id)
            if not was_sent and request_id not in bound:
                bound.add(request_id)
                to_send.append(replace(submission, request_id=request_id))
        return request_ids, to_send

    def mark_sent(self, submissions: Iterable[Submission]) -> None:
        """Mark the keys of these submissions as sent: they are in their queues."""
        names = [_redis_key(submission) for submission in submissions if "idempotency_key" in submission.headers]
        if names:
            with self._client.pipeline(transaction=False) as pipe:
                for name in names:
                    pipe.hset(name, "sent", "1")
                pipe.execute()

    def bound(self, model: str, tenant: str | None, key: str) -> tuple[str, bool] | None:
        """Return the request to which a key is bound and whether it was sent; None if the key is not bound."""
        found: Any = self._client.hmget(_key_of(model, tenant, key), ["request_id", "sent"])
        request_id, sent = found
        return None if request_id is None else (request_id.decode(), sent == b"1")

    def _bind(self, submission: Submission) -> tuple[str, bool]:
        content = json.dumps(_content(submission.request), sort_keys=True)
        fingerprint = hashlib.blake2b(content.encode(), digest_size=16).hexdigest()
        args = (submission.request_id, fingerprint, IDEMPOTENCY_SECONDS)
        known = self._claim(*args, idempotency=_redis_key(submission))
        request_id, known_fingerprint, sent = (value.decode() for value in known)
        if known_fingerprint != fingerprint:
            key = submission.headers["idempotency_key"]
            # The error does not name the other request's id, because any client that has the id can read its stream.
            raise InvalidRequestError(
                f"idempotency_key {key!r} was used with another prompt or other sampling parameters: choose a new key"
            )
        return request_id, sent == "1"


def _content(request: GenerateRequest | PoolingRequest | DecideRequest) -> dict[str, Any]:
    """Return what the key is bound to. Two pooling tasks may have the same keyword arguments."""
    kwargs = request.to_kwargs()
    return {**kwargs, "task": request.task} if isinstance(request, PoolingRequest) else kwargs


def _redis_key(submission: Submission) -> str:
    return _key_of(submission.model, submission.headers.get("tenant"), submission.headers["idempotency_key"])


def _key_of(model: str, tenant: str | None, key: str) -> str:
    """Return the Redis key. It has a digest, because idempotency keys and tenants are free text."""
    digest = hashlib.blake2b(json.dumps([model, tenant, key]).encode(), digest_size=16).hexdigest()
    return idempotency_key("" if tenant is None else tenant, digest)
