-- Makes the owner the reaper of each queue that has none, and keeps it the reaper of its own.
-- KEYS: REAPER[]
-- ARGV: owner
-- REAPER: one for each queue. Returns the number of queues whose reaper the owner is. A key of another type makes each
-- caller a reaper.
local num_reaped = 0
for _, reaper in ipairs(REAPER) do
  local found = redis.pcall('GET', reaper)
  local has_wrong_type = type(found) == 'table'
  if not found or found == owner then redis.call('SET', reaper, owner, 'PX', REAPER_MILLISECONDS) end
  if not found or found == owner or has_wrong_type then num_reaped = num_reaped + 1 end
end
return num_reaped
