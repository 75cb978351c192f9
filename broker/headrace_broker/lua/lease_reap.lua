-- Puts back the messages of silent workers. KEYS: the lease keys. ARGV: how many at most. Returns how many.
-- A server that takes no writes must say so here: behind it the other workers cannot renew either.
redis.call('ZREM', LEASES, '')
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
return #expired
