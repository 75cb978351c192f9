-- Binds an idempotency key to the first request that comes with it.
-- KEYS: IDEMPOTENCY
-- ARGV: request, fingerprint, seconds
-- Returns {request id, fingerprint, '1' if that request is in its queue for sure} of whoever was first.
local known = redis.call('HMGET', IDEMPOTENCY, 'request_id', 'fingerprint', 'sent')
if known[1] then return known end
redis.call('HSET', IDEMPOTENCY, 'request_id', request, 'fingerprint', fingerprint, 'sent', '0')
redis.call('EXPIRE', IDEMPOTENCY, seconds)
return {request, fingerprint, '0'}
