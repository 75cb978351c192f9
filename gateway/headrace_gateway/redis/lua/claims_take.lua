-- ARGV: most, held_ms
-- Returns each item with its token.
local due = redis.call('ZRANGEBYSCORE', DUE, '-inf', now, 'LIMIT', 0, tonumber(most))
-- counts on from the clock: if Redis loses its last second of writes, no token is given twice
local counted = tonumber(time[1]) * 1000000 + tonumber(time[2])
local last = tonumber(redis.call('HGET', TOKENS, '') or 0)
local taken = {}
for _, item in ipairs(due) do
  last = math.max(last + 1, counted)
  local token = string.format('%.0f', last)
  redis.call('HSET', TOKENS, '', token, item, token)
  redis.call('ZADD', DUE, 'XX', now + tonumber(held_ms), item)
  taken[#taken + 1] = {item, last}
end
return taken
