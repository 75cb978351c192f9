-- KEYS: each endpoint's due set, undelivered set and hash. Returns for each: number due, number undelivered, seconds
-- since the oldest was announced, milliseconds until the endpoint may be sent to, digest of its disabled URL.
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local levels = {}
for i = 1, #KEYS, 3 do
  local oldest = redis.call('ZRANGE', KEYS[i + 1], 0, 0, 'WITHSCORES')
  local resume = tonumber(redis.call('HGET', KEYS[i + 2], 'resume') or 0)
  levels[#levels + 1] = {
    redis.call('ZCOUNT', KEYS[i], '-inf', now),
    redis.call('ZCARD', KEYS[i + 1]),
    oldest[2] and math.floor(math.max(0, now - tonumber(oldest[2])) / 1000) or 0,
    math.max(0, resume - now),
    redis.call('HGET', KEYS[i + 2], 'disabled') or '',
  }
end
return levels
