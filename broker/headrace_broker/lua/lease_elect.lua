-- Makes the owner the reaper of each queue that has none, or else its deputy, and keeps it what it is.
-- KEYS: REAPER[], DEPUTY[]
-- ARGV: owner
-- REAPER, DEPUTY: one for each queue. Returns the number of queues whose reaper the owner is, and of those whose deputy
-- it is. A key of another type makes each caller a reaper or a deputy.
local function may_hold(key)
  local found = redis.pcall('GET', key)
  return not found or found == owner or type(found) == 'table', type(found) == 'table'
end
local num_reaped, num_deputised = 0, 0
for i = 1, #REAPER do
  local key = REAPER[i]
  local is_held, has_wrong_type = may_hold(key)
  if is_held then
    num_reaped = num_reaped + 1
  else
    key = DEPUTY[i]
    is_held, has_wrong_type = may_hold(key)
    if is_held then num_deputised = num_deputised + 1 end
  end
  if is_held and not has_wrong_type then redis.call('SET', key, owner, 'PX', REAPER_MILLISECONDS) end
end
return { num_reaped, num_deputised }
