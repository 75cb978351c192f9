-- Makes the owner the reaper of a queue if it has none, or else its deputy, and keeps it what it is.
-- KEYS: QUEUE
-- ARGV: owner
-- Returns 2 if the owner is the reaper, 1 if it is the deputy, else 0. A key of another type makes each caller a reaper
-- or a deputy.
local function hold(key)
  local found = redis.pcall('GET', key)
  if type(found) == 'table' then return true end
  if found and found ~= owner then return false end
  redis.call('SET', key, owner, 'PX', REAPER_MILLISECONDS)
  return true
end
return hold(REAPER) and 2 or hold(DEPUTY) and 1 or 0
