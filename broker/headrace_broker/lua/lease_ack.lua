-- ARGV: owner, id, tokens
-- tokens: what it has cost, or '' where that is not known.
-- Returns 1, or 0 where the lease was no longer the owner's.
tokens = tonumber(tokens)
if not owned_list(id, owner) then return 0 end
local record = record_of(id)
revoke(id)
forget(id)
redis.call('HDEL', LEASE_DELIVERIES, id)
-- what the tenant has cost is not worth a message that stays for ever
if record and tokens and not problem_of_level(record.level) then settle(record, tokens) end
return 1
