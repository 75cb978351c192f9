-- Puts back the messages of silent workers.
-- ARGV: most
-- Returns how many, and what kept others in their leases, or ''.
local RETRY_SECONDS = 1
-- A server that takes no writes must say so here: behind it the other workers cannot renew either.
redis.call('ZREM', LEASES, '')
local STRAYS_LOOKED_AT = 100
local expired = redis.call('ZRANGEBYSCORE', LEASES, '-inf', now(), 'LIMIT', 0, most)
local num_put_back, problem = 0, ''
for i = #expired, 1, -1 do
  local id = expired[i]
  local meta = redis.call('HGET', LEASE_META, id)
  local kept = put_back(id, meta and list_of(meta))
  if kept then
    redis.call('ZADD', LEASES, now() + RETRY_SECONDS, id) -- behind those that can be put back
    problem = kept
  else
    num_put_back = num_put_back + 1
  end
end
-- A worker of an earlier version forgets a message without its request id.
if redis.call('HLEN', LEASE_REQUESTS) > redis.call('HLEN', LEASE_BODIES) then
  for _, request in ipairs(redis.call('HRANDFIELD', LEASE_REQUESTS, STRAYS_LOOKED_AT)) do
    if not holder_of(request) then redis.call('HDEL', LEASE_REQUESTS, request) end
  end
end
return {num_put_back, problem}
