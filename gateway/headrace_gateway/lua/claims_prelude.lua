-- KEYS[1]: sorted set, item -> when it is due, in milliseconds of Redis's clock.
-- KEYS[2]: hash, item -> the token of its claim; the field '' has the last token.
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)

local function is_held(item, token)
  return redis.call('HGET', KEYS[2], item) == token and redis.call('ZSCORE', KEYS[1], item)
end
