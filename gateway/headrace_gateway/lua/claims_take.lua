-- ARGV: how many at most, milliseconds that they are held. Returns each item with its token.
local due = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, tonumber(ARGV[1]))
-- a Redis that has lost its last second counts on from its clock, so that no token is given twice
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
