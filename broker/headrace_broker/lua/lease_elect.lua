-- Makes the owner the reaper of each queue that has none, or else its deputy, and keeps it what it is.
-- KEYS: REAPER[], DEPUTY[]
-- ARGV: owner
-- REAPER, DEPUTY: one for each queue. Returns the number of queues whose reaper the owner is, and of those whose deputy
-- it is. A key of another type makes each caller a reaper or a deputy.
local function hold(key)
  local found = redis.pcall('GET', key)
  if type(found) == 'table' then return true end
  if found and found ~= owner then return false end
  redis.call('SET', key, owner, 'PX', REAPER_MILLISECONDS)
  return true
end
local num_reaped, num_deputised = 0, 0
for i = 1, #REAPER do
  if hold(REAPER[i]) then
    num_reaped = num_reaped + 1
  elseif hold(DEPUTY[i]) then
    num_deputised = num_deputised + 1
  end
end
return { num_reaped, num_deputised }
