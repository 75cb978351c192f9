-- Deletes sorted messages that wait. KEYS: the lease keys, then the lists of one queue. ARGV: how many at most.
-- Returns how many it deleted.
local purged = 0
for i = 9, #KEYS do
  local problem = problem_of_level(KEYS[i])
  if problem then return {err = problem} end
end
for i = 9, #KEYS do
  local level = KEYS[i]
  for _, id in ipairs(redis.call('ZRANGE', ids_at(level), 0, ARGV[1] - purged - 1)) do
    local record, body = record_of(id, queue_of(level)), redis.call('HGET', BODIES, id)
    leave(id, {level = level, tenant = record and record.tenant or body and tenant_of(body) or ''})
    forget(id)
    redis.call('HDEL', DELIVERIES, id)
    purged = purged + 1
  end
  if purged >= tonumber(ARGV[1]) then break end
end
ring(queue_of(KEYS[9]))
return purged
