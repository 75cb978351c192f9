-- KEYS: DUE[], UNDELIVERED[], ENDPOINT[]
-- Returns for each endpoint: number due, number undelivered, seconds since the oldest was announced, milliseconds until
-- the endpoint may be sent to, digest of its disabled URL.
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local levels = {}
for i, due in ipairs(DUE) do
  local oldest = redis.call('ZRANGE', UNDELIVERED[i], 0, 0, 'WITHSCORES')
  local resume = tonumber(redis.call('HGET', ENDPOINT[i], 'resume') or 0)
  levels[#levels + 1] = {
    redis.call('ZCOUNT', due, '-inf', now),
    redis.call('ZCARD', UNDELIVERED[i]),
    oldest[2] and math.floor(math.max(0, now - tonumber(oldest[2])) / 1000) or 0,
    math.max(0, resume - now),
    redis.call('HGET', ENDPOINT[i], 'disabled') or '',
  }
end
return levels
