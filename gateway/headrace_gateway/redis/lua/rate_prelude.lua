-- KEYS: RATE
-- RIGHTS: RATE
-- Token buckets: each holds the amount of one minute, refills evenly, and may go below zero.
-- A field of the hash has the level and the Unix seconds at which it was written.
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6

local function level_of(name, bound)
  local kept = redis.call('HGET', RATE, name)
  local level, at = string.match(kept or '', '^(%S+) (%S+)$')
  level, at = tonumber(level), tonumber(at)
  if not level or not at then
    return bound
  end
  return math.min(bound, level + math.max(0, now - at) * bound / 60)
end

local function keep(levels, bounds)
  local full = 0
  for name, level in pairs(levels) do
    redis.call('HSET', RATE, name, string.format('%.6f %.6f', level, now))
    full = math.max(full, (bounds[name] - level) * 60 / bounds[name])
  end
  -- a full bucket equals an absent one, so the key may expire
  local left = redis.call('TTL', RATE)
  redis.call('EXPIRE', RATE, math.max(left, math.ceil(full) + 60))
end
