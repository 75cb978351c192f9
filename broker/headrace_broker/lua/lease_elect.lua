-- Makes the owner the reaper of each queue that has none, and keeps it the reaper of its own.
-- KEYS: REAPER[]
-- ARGV: owner
-- REAPER: one for each queue. Returns the number of queues whose reaper the owner is. A key of another type makes each
-- caller a reaper.
local num_reaped = 0
for _, reaper in ipairs(REAPER) do
  local found = redis.pcall('GET', reaper)
  local is_free = not found and redis.call('SET', reaper, owner, 'PX', REAPER_MILLISECONDS)
  if found == owner then redis.call('PEXPIRE', reaper, REAPER_MILLISECONDS) end
  if is_free or found == owner or type(found) == 'table' then num_reaped = num_reaped + 1 end
end
return num_reaped
