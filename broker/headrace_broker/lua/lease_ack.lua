-- KEYS: the lease keys. ARGV: owner, id, tokens that it has cost, or '' where that is not known.
-- Returns 1, or 0 where the lease was no longer the owner's.
local owner, id, tokens = ARGV[1], ARGV[2], tonumber(ARGV[3])
if not owned_list(id, owner) then return 0 end
local record = record_of(id)
revoke(id)
forget(id)
redis.call('HDEL', DELIVERIES, id)
-- what the tenant has cost is not worth a message that stays for ever
if record and tokens and not problem_of_level(record.level) then settle(record, tokens) end
return 1
