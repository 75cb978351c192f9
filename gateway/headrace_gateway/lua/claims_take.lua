-- ARGV: how many at most, milliseconds that they are held. Returns each item with its token.
local due = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, tonumber(ARGV[1]))
local taken = {}
for _, item in ipairs(due) do
  local token = redis.call('HINCRBY', KEYS[2], '', 1)
  redis.call('HSET', KEYS[2], item, token)
  redis.call('ZADD', KEYS[1], 'XX', now + tonumber(ARGV[2]), item)
  taken[#taken + 1] = {item, token}
end
return taken
