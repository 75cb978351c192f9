-- ARGV: item, due_in_ms
-- Returns 1 if it is new.
return redis.call('ZADD', DUE, 'NX', now + tonumber(due_in_ms), item)
