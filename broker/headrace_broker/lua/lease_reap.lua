-- Puts back messages whose lease has expired.
-- ARGV: most
-- Returns how many, and the problem that keeps others from being put back, or ''.
local RETRY_SECONDS = 1
-- This write fails if the server accepts none: then the other workers cannot renew their leases either.
redis.call('ZREM', LEASES, '')
local STALE_CHECKED = 100
local expired = redis.call('ZRANGEBYSCORE', LEASES, '-inf', now(), 'LIMIT', 0, most)
local num_put_back, problem = 0, ''
for i = #expired, 1, -1 do
  local id = expired[i]
  local meta = redis.call('HGET', LEASE_META, id)
  local blocked_by = put_back(id, meta and list_of(meta))
  if blocked_by then
    redis.call('ZADD', LEASES, now() + RETRY_SECONDS, id) -- after those that can be put back
    problem = blocked_by
  else
    num_put_back = num_put_back + 1
  end
end
-- A worker of an earlier version deletes a message, but leaves its request id.
if redis.call('HLEN', LEASE_REQUESTS) > redis.call('HLEN', LEASE_BODIES) then
  for _, request in ipairs(redis.call('HRANDFIELD', LEASE_REQUESTS, STALE_CHECKED)) do
    if not holder_of(request) then redis.call('HDEL', LEASE_REQUESTS, request) end
  end
end
return {num_put_back, problem}
