"""`BatchRunner`: claims batches, renews the claims while it works on them, and hands batches over."""

import asyncio
import contextlib
import secrets
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, NamedTuple

import structlog

from headrace_broker.server.connections import REDIS_ERRORS
from headrace_gateway.background_task import check_cancelled, keep_running, poll
from headrace_gateway.batch.line_request import patient_hub
from headrace_gateway.batch.store import BatchStore, ClaimLostError
from headrace_gateway.batch.window import SharedWindow
from headrace_gateway.batch.work import BatchContext, BatchWork
from headrace_gateway.context import Gateway
from headrace_gateway.files.stored_files import StoredFiles
from headrace_gateway.files.threads import in_file_thread
from headrace_gateway.redis.claims import Claim
from headrace_monitoring.logging import frames

MAX_BATCHES: Final = 32
"""Batches that one replica runs at a time."""
_MOST_OF_A_KEY: Final = MAX_BATCHES // 4
_POLL_SECONDS: Final = 1.0
_RENEWALS_PER_CLAIM: Final = 5
"""How often a claim is renewed in its lifetime."""
_SWEEP_SECONDS: Final = 600.0
_RETRY_SECONDS: Final = 10.0

logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(__name__)


class _Held(NamedTuple):
    work: BatchWork
    task: "asyncio.Task[None]"
    owner: tuple[str, str | None] | None
    """The name and the tenant of the API key that owns the batch."""


class BatchRunner:
    """A background task of every replica."""

    def __init__(self, context: BatchContext) -> None:
        self._context: Final = context
        self._claims: Final = context.store.claims
        self._held: Final[dict[Claim, _Held]] = {}
        self._renewed_at = 0.0

    async def run(self) -> None:
        """Work until cancelled."""
        sweeping = asyncio.create_task(self._sweep_periodically())  # a sweep may take longer than a claim lasts
        try:
            await poll(self._poll, "batches", seconds=_POLL_SECONDS)
        finally:
            sweeping.cancel()
            await self._hand_over()

    async def _poll(self) -> bool:
        self._update_metrics()
        await self._reap()
        now = time.monotonic()
        if now - self._renewed_at > self._claims.seconds / _RENEWALS_PER_CLAIM:
            for claim in await self._claims.renew(self._held):
                self._held[claim].task.cancel()
            self._renewed_at = now
        # one per poll, so that other replicas get some, too
        while len(self._held) < MAX_BATCHES and (taken := await self._claims.take(1)):
            if await self._begin(taken[0]):
                break
        return False

    async def _begin(self, claim: Claim) -> bool:
        """Start work on a batch; return False if its claim was released instead."""
        older = [held for claimed, held in self._held.items() if claimed.item == claim.item]
        for held in older:  # Redis has lost its claim; two tasks must not run one batch
            held.task.cancel()
        if older:
            await self._claims.release(claim, after=_POLL_SECONDS)
            return False
        batch = await self._context.store.find(claim.item)
        owner = None if batch is None else (batch.record.key, batch.record.tenant)
        if sum(held.owner == owner for held in self._held.values()) >= _MOST_OF_A_KEY:
            await self._claims.release(claim, after=_RETRY_SECONDS)
            return False
        logger.info("batch taken", id=claim.item, token=claim.token)
        work = BatchWork(self._context, claim)
        self._held[claim] = _Held(work, asyncio.create_task(work.run()), owner)
        return True

    async def _reap(self) -> None:
        for claim, held in list(self._held.items()):
            task = held.task
            if not task.done():
                continue
            error = None if task.cancelled() else task.exception()
            if task.cancelled() or isinstance(error, ClaimLostError):
                logger.warning("batch lost to another replica", id=claim.item, token=claim.token)
            elif error is not None:
                logger.error("batch failed in this replica", id=claim.item, exception=frames(error))
                await self._claims.release(claim, after=_RETRY_SECONDS)
            del self._held[claim]

    async def _sweep_periodically(self) -> None:
        while True:
            try:
                await self.sweep()
            except (OSError, *REDIS_ERRORS) as error:
                check_cancelled()
                logger.warning("files directory not swept", reason=type(error).__name__)
            await asyncio.sleep(_SWEEP_SECONDS)

    async def sweep(self) -> None:
        """Delete expired and abandoned files from the directory of files."""
        files, store = self._context.files, self._context.store
        folders = await in_file_thread(files.sweep)
        if folders and not await self._has_these_batches():
            logger.warning("batch folders not swept: the files directory belongs to another Redis")
            return
        for folder in folders:
            batch = await store.find(folder.name)
            if batch is None or batch.has_ended:
                await in_file_thread(shutil.rmtree, folder, ignore_errors=True)

    async def _has_these_batches(self) -> bool:
        """Return whether the batches in the directory are stored in this Redis. No other Redis knows any of them."""
        files, store = self._context.files, self._context.store
        kept = await in_file_thread(files.redis_id)
        if kept is None:
            kept = await in_file_thread(files.redis_id, await store.redis_id(secrets.token_hex(16)))
        return kept == await store.redis_id()

    def _update_metrics(self) -> None:
        works = [held.work for held in self._held.values()]
        idle = max((time.monotonic() - work.moved_at for work in works), default=0.0)
        self._context.metrics.batches(len(works), sum(work.waits_for_disk for work in works), idle)

    async def _hand_over(self) -> None:
        """Release all batches, so that another replica resumes them at once."""
        tasks = [held.task for held in self._held.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        with contextlib.suppress(*REDIS_ERRORS):  # without Redis, the claims expire
            for claim in self._held:
                await self._claims.release(claim)


@asynccontextmanager
async def running_batches(gateway: Gateway, files: StoredFiles | None, store: BatchStore) -> AsyncIterator[None]:
    """Run batches while the block runs, if the gateway has a directory of files."""
    if files is None:
        yield
        return
    settings = gateway.settings
    async with patient_hub(gateway.client.settings) as hub:
        context = BatchContext(
            client=gateway.client,
            hub=hub,
            models=gateway.models,
            store=store,
            files=files,
            bodies=gateway.bodies,
            window=SharedWindow(settings.batch_window, max(1, settings.batch_window // MAX_BATCHES)),
            metrics=gateway.metrics,
            priority=settings.batch_priority,
            publish=gateway.webhooks.publish,
            strict=settings.strict,
        )
        running = asyncio.create_task(keep_running(BatchRunner(context).run))
        try:
            yield
        finally:
            running.cancel()
            await asyncio.wait([running])
