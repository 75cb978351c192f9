-- Estimates the tokens of a queue's messages that are due. Writes nothing.
-- KEYS: QUEUE, LIST[], ARRIVED[], SORTED_IDS[], HELD[], DELAYED[]
-- A message costs the moving average of its tenant's requests. If it is unknown, or the message is not sorted yet, it
-- costs the queue's average. Messages that no worker has returned to the queue yet count as waiting: those of expired
-- leases, and delayed ones that are due. Messages that are not due do not count.
-- Returns {tokens of waiting messages, tokens of leased ones} as text; {} if there are messages, and no average because
-- no request of the queue has ended recently. A key of the wrong type counts as empty.
local MOST_TENANTS = 1000 -- those with the most messages; the messages of others cost the queue's average

local function count(...) return number_in(redis.pcall(...), 0) end

-- Returns the members of a sorted set with numbers as scores.
local function scores(key, first, last)
  local entries, found = redis.pcall('ZRANGE', key, first, last, 'WITHSCORES'), {}
  for i = 1, #entries, 2 do found[entries[i]] = number_in(entries[i + 1], nil) end
  return found
end

local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
local waiting, leased = 0, 0
for i, list in ipairs(LIST) do
  local expired = count('ZCOUNT', HELD[i], '-inf', now)
  waiting = waiting + count('LLEN', list) + count('LLEN', ARRIVED[i]) + count('ZCARD', SORTED_IDS[i]) + expired
    + count('ZCOUNT', DELAYED[i], '-inf', now)
  leased = leased + count('ZCARD', HELD[i]) - expired
end
if waiting + leased == 0 then return {'0', '0'} end

local mean = number_in(redis.pcall('GET', MEAN_COST), nil)
if not mean or mean <= 0 then return {} end
local tokens = waiting * mean
local costs = scores(COSTS, 0, MOST_TENANTS - 1)
for tenant, num_messages in pairs(scores(WAITING, -MOST_TENANTS, -1)) do
  if costs[tenant] then tokens = tokens + num_messages * (costs[tenant] - mean) end
end
return {string.format('%.0f', math.max(0, tokens)), string.format('%.0f', leased * mean)}
