-- KEYS: the lease keys. ARGV: owner, seconds of the lease, ids. Returns the ids that the owner has lost.
local owner, expires = ARGV[1], now() + tonumber(ARGV[2])
local lost = {}
-- A server out of memory refuses a script whose first write may need more. ZADD counts among these, though a renewal
-- needs none; after a removal, here of nothing, it is allowed.
redis.call('ZREM', LEASES, '')
for i = 3, #ARGV do
  local list = owned_list(ARGV[i], owner)
  if list then
    redis.call('ZADD', LEASES, expires, ARGV[i])
    hold(list, expires, ARGV[i])
  else
    lost[#lost + 1] = ARGV[i]
  end
end
return lost
