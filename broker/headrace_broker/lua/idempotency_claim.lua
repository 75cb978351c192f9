-- Binds an idempotency key to the first request that has it.
-- KEYS: IDEMPOTENCY
-- RIGHTS: IDEMPOTENCY
-- ARGV: request, fingerprint, seconds
-- fingerprint: digest of the request. seconds: lifetime of the key.
-- Returns {request id, fingerprint, sent} of the first request. sent is '1' if that request is known to be in its
-- queue.
local known = redis.call('HMGET', IDEMPOTENCY, 'request_id', 'fingerprint', 'sent')
if known[1] then return known end
redis.call('HSET', IDEMPOTENCY, 'request_id', request, 'fingerprint', fingerprint, 'sent', '0')
redis.call('EXPIRE', IDEMPOTENCY, seconds)
return {request, fingerprint, '0'}
