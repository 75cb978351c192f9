-- Leases delayed messages.
-- KEYS: LIST[]
-- ARGV: most, owner, seconds
-- LIST: the lists of one queue. most: how many to lease at most. seconds: duration of the lease.
-- Returns for each message {lease id, list, body, grant number or 0 if it has no record, stream server of its request or
-- ''}.
local wanted = tonumber(most)
local taken = {}
for _, list in ipairs(LIST) do
  local problem = problem_of(delayed_key(list), 'zset') or problem_of_list(list)
  if problem then return {err = problem} end
end
for _, list in ipairs(LIST) do
  for _, id in ipairs(redis.call('ZRANGE', delayed_key(list), 0, wanted - #taken - 1)) do
    local record = record_of(id)
    undelay(id, record)
    revoke(id)
    redis.call('ZREM', delayed_key(list), id)
    local body = redis.call('HGET', LEASE_BODIES, id)
    if body then
      grant(id, owner, list, tonumber(seconds))
      if record then -- missing if keys were deleted by hand
        count_grant(record)
        keep(id, record)
      end
      taken[#taken + 1] = {id, list, body, record and record.grant or 0, record and record.at or ''}
    end
  end
  if #taken >= wanted then break end
end
return taken
