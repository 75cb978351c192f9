-- Returns the seconds until the earliest deadline of a queue's waiting messages, as text. The number is negative if the
-- deadline has passed, and '' if no waiting message has one. Writes nothing.
-- KEYS: DEADLINES, LIST[], ARRIVED[]
-- Sorted messages are in DEADLINES. Of unsorted ones only the oldest of each list is read. A key of the wrong type counts
-- as empty.
local earliest = number_in(redis.pcall('ZRANGE', DEADLINES, 0, 0, 'WITHSCORES')[2], math.huge)
for i, list in ipairs(LIST) do
  for _, key in ipairs({ARRIVED[i], list}) do
    local body = redis.pcall('LINDEX', key, -1)
    local deadline = type(body) == 'string' and select(5, tenant_of(body))
    earliest = math.min(earliest, deadline or math.huge)
  end
end
if earliest == math.huge then return '' end
local time = redis.call('TIME')
return string.format('%.6f', (earliest - time[2]) / 1000000 - time[1])
