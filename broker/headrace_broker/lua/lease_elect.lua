-- Makes the owner the reaper of a queue if it has none, or else its deputy, and keeps it what it is.
-- KEYS: QUEUE, LIST[]
-- ARGV: owner, is_paused
-- LIST: the lists of the queue. is_paused: '1' if the owner must not be the reaper, else ''. Result: {3 for a reaper without a deputy, 2 for one with a deputy, 1 for the deputy, else
-- 0; 1 if the queue has no message, else 0}. A key of another type makes each caller a reaper or a deputy.
--
-- Idle workers call it, so it has no preludes: with those of the reaper's script it took Redis twice as long.
local stored = {LEASES, LEASE_BODIES, LEASE_REQUESTS, DEADLINES}
for _, list in ipairs(LIST) do
  for _, key in ipairs({list, arrived_key(list), held_key(list), delayed_key(list)}) do stored[#stored + 1] = key end
end
local is_empty = redis.call('EXISTS', unpack(stored)) == 0

local function take(role)
  local holder = redis.pcall('GET', role)
  if type(holder) == 'table' then return true end
  if holder and holder ~= owner then return false end
  redis.call('SET', role, owner, 'PX', is_empty and RESTING_REAPER_MILLISECONDS or REAPER_MILLISECONDS)
  return true
end

local role = is_paused == '' and take(REAPER) and (redis.call('EXISTS', DEPUTY) == 1 and 2 or 3) or take(DEPUTY) and 1 or 0
return {role, is_empty and 1 or 0}
