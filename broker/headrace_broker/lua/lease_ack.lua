-- KEYS: the five lease keys. ARGV: owner, id. Returns 1, or 0 where the lease was no longer the owner's.
local owner, id = ARGV[1], ARGV[2]
if not owned_list(id, owner) then return 0 end
revoke(id)
redis.call('HDEL', DELIVERIES, id)
return 1
