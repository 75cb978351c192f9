-- Deletes waiting messages that a worker has already moved from the producer's list to sorted sets.
-- KEYS: LIST[]
-- ARGV: most
-- LIST: the lists of one queue. most: how many to delete at most. Returns how many it deleted.
local purged = 0
for _, list in ipairs(LIST) do
  local problem = problem_of_list(list)
  if problem then return {err = problem} end
end
for _, list in ipairs(LIST) do
  for _, id in ipairs(redis.call('ZRANGE', sorted_ids_key(list), 0, most - purged - 1)) do
    local record, body = record_of(id), redis.call('HGET', LEASE_BODIES, id)
    leave(id, {level = list, tenant = record and record.tenant or body and tenant_of(body) or ''})
    forget(id)
    redis.call('HDEL', LEASE_DELIVERIES, id)
    purged = purged + 1
  end
  if purged >= tonumber(most) then break end
end
update_wake_up()
return purged
