-- Renews leases.
-- ARGV: owner, seconds, ids[]
-- seconds: duration of the lease. Returns the ids of the leases that the owner has lost.
local expires = now() + tonumber(seconds)
local lost = {}
-- A server out of memory refuses a script whose first write may need memory. ZADD is such a write, though a renewal
-- needs none. Redis allows it after a removal, here of nothing.
redis.call('ZREM', LEASES, '')
for _, id in ipairs(ids) do
  local list = owned_list(id, owner)
  if list then
    redis.call('ZADD', LEASES, expires, id)
    hold(list, expires, id)
  else
    lost[#lost + 1] = id
  end
end
return lost
