-- Puts back the messages of silent workers. KEYS: the lease keys. ARGV: how many at most. Returns how many.
-- A server that takes no writes must say so here: behind it the other workers cannot renew either.
redis.call('ZREM', LEASES, '')
local STRAYS_LOOKED_AT = 100
local expired = redis.call('ZRANGEBYSCORE', LEASES, '-inf', now(), 'LIMIT', 0, ARGV[1])
for i = #expired, 1, -1 do
  local meta = redis.call('HGET', META, expired[i])
  if meta then
    put_back(expired[i], list_of(meta))
  else -- somebody has deleted keys by hand
    undelay(expired[i], record_of(expired[i]))
    revoke(expired[i])
    forget(expired[i])
  end
end
-- A worker of an earlier version forgets a message without its request id.
if redis.call('HLEN', REQUESTS) > redis.call('HLEN', BODIES) then
  for _, request in ipairs(redis.call('HRANDFIELD', REQUESTS, STRAYS_LOOKED_AT)) do
    if not holder_of(request) then redis.call('HDEL', REQUESTS, request) end
  end
end
return #expired
