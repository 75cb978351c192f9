-- ARGV: maximum of items, milliseconds for which they are claimed. Returns each item with its token.
local due = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, tonumber(ARGV[1]))
-- counts on from the clock: if Redis loses its last second of writes, no token is given twice
local counted = tonumber(time[1]) * 1000000 + tonumber(time[2])
local last = tonumber(redis.call('HGET', KEYS[2], '') or 0)
local taken = {}
for _, item in ipairs(due) do
  last = math.max(last + 1, counted)
  local token = string.format('%.0f', last)
  redis.call('HSET', KEYS[2], '', token, item, token)
  redis.call('ZADD', KEYS[1], 'XX', now + tonumber(ARGV[2]), item)
  taken[#taken + 1] = {item, last}
end
return taken
