-- Wakes another worker for the messages that a woken worker has not taken.
-- KEYS: LIST[]
-- LIST: the lists of the queue.
-- A server out of memory refuses a script whose first write may need memory, so the first write is a removal of
-- nothing.
redis.call('ZREM', LEASES, '')
wake(LIST)
