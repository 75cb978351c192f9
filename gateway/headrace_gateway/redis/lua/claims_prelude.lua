-- KEYS: DUE, TOKENS
-- RIGHTS: DUE
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)

local function is_held(item, token)
  return redis.call('HGET', TOKENS, item) == token and redis.call('ZSCORE', DUE, item)
end
