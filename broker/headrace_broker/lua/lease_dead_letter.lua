-- Moves one message to the dead letters, and makes its final writes.
-- KEYS: KEY[]
-- ARGV: owner, id, reason, entry, writes[], values[], numbers[]
-- id: of the lease. entry: what the usage ledger counts; '' for nothing. Returns nothing if the owner has lost the lease,
-- else {list where the message arrived, body, number of deliveries, request id that was bound to the message or '',
-- stream server of that request or ''}.
local list = owned_list(id, owner)
if not list then return false end
local refusal = final_writes_problem()
if refusal then return {err = refusal} end
local body = redis.call('HGET', LEASE_BODIES, id)
local deliveries = number_in(redis.call('HGET', LEASE_DELIVERIES, id), 0)
local record = record_of(id)
-- A server out of memory refuses a script whose first write may need memory, so the first write is a removal of
-- nothing.
redis.call('ZREM', LEASES, '')
make_final_writes()
dead_letter(body, list, deliveries, reason)
forget(id, record)
count_usage(id, record, entry)
redis.call('HDEL', LEASE_DELIVERIES, id)
revoke(id)
return {list, body, deliveries, record and record.request or '', record and record.at or ''}
