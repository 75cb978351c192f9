-- Acknowledges one message.
-- ARGV: owner, id, tokens
-- id: of the lease. tokens: what the message cost, in tokens of prompt and output; '' if unknown.
-- Returns 1, or 0 if the owner has lost the lease.
tokens = tonumber(tokens)
if not owned_list(id, owner) then return 0 end
local record = record_of(id)
forget(id)
redis.call('HDEL', LEASE_DELIVERIES, id)
revoke(id)
-- a problem of the list must not prevent the acknowledgement; the cost is then not charged
if record and tokens and not problem_of_list(record.level) then charge_actual(record, tokens) end
return 1
