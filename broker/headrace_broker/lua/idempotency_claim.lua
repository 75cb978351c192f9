-- Binds an idempotency key to the first request that comes with it.
-- KEYS: key. ARGV: request id, fingerprint of the request, seconds to live.
-- Returns {request id, fingerprint, '1' if that request is in its queue for sure} of whoever was first.
local known = redis.call('HMGET', KEYS[1], 'request_id', 'fingerprint', 'sent')
if known[1] then return known end
redis.call('HSET', KEYS[1], 'request_id', ARGV[1], 'fingerprint', ARGV[2], 'sent', '0')
redis.call('EXPIRE', KEYS[1], ARGV[3])
return {ARGV[1], ARGV[2], '0'}
