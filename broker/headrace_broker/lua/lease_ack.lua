-- Acknowledges one message, and makes its final writes.
-- KEYS: KEY[]
-- ARGV: owner, id, tokens, entry, writes[], values[], numbers[]
-- id: of the lease. tokens: what the message cost, in tokens of prompt and output; '' if unknown. entry: what the usage
-- ledger counts; '' for nothing.
-- Returns 1, or 0 if the owner has lost the lease.
tokens = tonumber(tokens)
local list = owned_list(id, owner)
if not list then return 0 end
if #KEY > 0 then
  local refusal = final_writes_problem()
  if refusal then return {err = refusal} end
  -- A server out of memory refuses a script whose first write may need memory, so the first write is a removal of
  -- nothing.
  redis.call('ZREM', LEASES, '')
  make_final_writes()
end
local record = record_of(id)
forget(id, record)
count_usage(id, record, entry)
redis.call('HDEL', LEASE_DELIVERIES, id)
revoke(id, list)
-- a key of the wrong type must not prevent the acknowledgement; the cost is then not charged, or not in all keys
if record and tokens then pcall(charge_actual, record, tokens) end
return 1
