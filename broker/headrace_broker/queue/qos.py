"""`QoS`: what kombu calls when Celery acknowledges or rejects a message."""

import logging
from typing import Any

import redis
from kombu.transport import virtual

from headrace_wire.codes import DeadLetterReason

logger = logging.getLogger(__name__)


class QoS(virtual.QoS):
    """Passes acknowledgements and rejections of leased messages to `Leases`."""

    # A closing channel requeues nothing: leased messages stay held, and others cannot be sent to a lost server.
    restore_at_shutdown = False

    def append(self, message: Any, delivery_tag: str) -> None:
        if self.channel.leased:
            self.channel.leases.hold(delivery_tag, message)
        else:
            super().append(message, delivery_tag)

    def ack(self, delivery_tag: str) -> None:
        if self.channel.leased:
            self.channel.leases.ack(delivery_tag)
        else:
            super().ack(delivery_tag)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        if not self.channel.leased:
            super().reject(delivery_tag, requeue=requeue)
        elif requeue:
            self.channel.leases.requeue(delivery_tag, is_counted=True)  # counted: the message caused it
        else:
            self.channel.leases.dead_letter(delivery_tag, DeadLetterReason.REJECTED)

    def can_consume(self) -> bool:
        if self.channel.leased:
            return bool(not self.channel.hands_over and self.channel.free_slots() > 0)
        return bool(super().can_consume())

    def restore_visible(self, *_args: Any, **_kwargs: Any) -> None:
        # kombu's timer calls this on an arbitrary channel, so it must not depend on that channel's queues
        try:
            self.channel.leases.reap()
        except redis.ResponseError as error:
            logger.warning("expired leases not reaped: %s", error)
            self.channel.leases.on_refused(str(error))
