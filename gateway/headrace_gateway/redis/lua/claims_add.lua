-- ARGV: item, due_in_ms
-- due_in_ms: milliseconds until the item is due. Returns 1 if the item is new, else 0.
return redis.call('ZADD', DUE, 'NX', now + tonumber(due_in_ms), item)
