-- ARGV: most, held_ms
-- most: number of items to take. held_ms: milliseconds until the claims expire. Returns a list of {item, token}.
local due = redis.call('ZRANGEBYSCORE', DUE, '-inf', now, 'LIMIT', 0, tonumber(most))
-- tokens are at least the clock in microseconds: no token repeats, even if Redis loses its last second of writes
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
