-- KEYS: STORED, STORED_BYTES
-- RIGHTS: STORED
-- ARGV: item, num_bytes, seconds, bound
-- Counts `num_bytes` for an item until `seconds` have passed. 0 bytes remove the item.
-- bound: limit of all items in bytes, lowered to a quarter of `maxmemory` if that is less; 0: no limit.
-- Returns nil; {bytes of the other items, limit} if the item has no room.
local now = tonumber(redis.call('TIME')[1])
local bytes, limit = tonumber(num_bytes), tonumber(bound)
local function end_count(name)
  -- not -tonumber(...): Redis 7.0 takes no -0
  redis.call('HINCRBY', STORED_BYTES, '', 0 - tonumber(redis.call('HGET', STORED_BYTES, name) or '0'))
  redis.call('HDEL', STORED_BYTES, name)
  redis.call('ZREM', STORED, name)
end
for _, name in ipairs(redis.call('ZRANGE', STORED, '-inf', now, 'BYSCORE', 'LIMIT', 0, 1000)) do
  end_count(name)
end
local before = tonumber(redis.call('HGET', STORED_BYTES, item) or '0')
local used = tonumber(redis.call('HGET', STORED_BYTES, '') or '0') - before
if limit > 0 then
  local most = tonumber(string.match(redis.call('INFO', 'memory'), 'maxmemory:(%d+)') or '0')
  limit = most > 0 and math.min(limit, math.floor(most / 4)) or limit
  if used + bytes > limit then
    return {used, limit}
  end
end
end_count(item)
if bytes > 0 then
  local kept = math.max(tonumber(seconds), redis.call('TTL', STORED), redis.call('TTL', STORED_BYTES))
  redis.call('ZADD', STORED, now + tonumber(seconds), item)
  redis.call('HSET', STORED_BYTES, item, bytes)
  redis.call('HINCRBY', STORED_BYTES, '', bytes)
  redis.call('EXPIRE', STORED, kept)
  redis.call('EXPIRE', STORED_BYTES, kept)
elseif redis.call('ZCARD', STORED) == 0 then
  redis.call('DEL', STORED_BYTES)
end
return nil
