-- Moves one message to the dead letters.
-- ARGV: owner, id, reason
-- id: of the lease. Returns nothing if the owner has lost the lease, else {list where the message arrived, body, number
-- of deliveries, request id that was bound to the message or ''}.
local list = owned_list(id, owner)
if not list then return false end
local body = redis.call('HGET', LEASE_BODIES, id)
local deliveries = number_in(redis.call('HGET', LEASE_DELIVERIES, id), 0)
local record = record_of(id)
-- A server out of memory refuses a script whose first write may need memory, so the first write is a removal of
-- nothing.
redis.call('ZREM', LEASES, '')
dead_letter(body, list, deliveries, reason)
forget(id)
redis.call('HDEL', LEASE_DELIVERIES, id)
revoke(id)
return {list, body, deliveries, record and record.request or ''}
