-- KEYS: BATCH, BATCHES, DUE
-- RIGHTS: BATCH
-- ARGV: id, kept_ms, most_open, most_kept, fields[], values[]
-- most_open, most_kept: maximum of open and of stored batches.
-- Returns 1; 0 if too many batches of the API key are open.
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local has_ended = {completed = true, failed = true, expired = true, cancelled = true}
redis.call('ZREMRANGEBYSCORE', BATCHES, '-inf', now - tonumber(kept_ms))
local ids = redis.call('ZRANGE', BATCHES, 0, -1)
local ended = {}
local open = 0
for _, other in ipairs(ids) do
  local status = redis.call('HGET', batch_key(other), 'status')
  if not status or has_ended[status] then
    ended[#ended + 1] = other
  else
    open = open + 1
  end
end
if open >= tonumber(most_open) then
  return 0
end
for i = 1, math.min(#ended, #ids + 1 - tonumber(most_kept)) do
  redis.call('ZREM', BATCHES, ended[i])
  redis.call('DEL', batch_key(ended[i]))
end
for i, field in ipairs(fields) do
  redis.call('HSET', BATCH, field, values[i])
end
redis.call('PEXPIRE', BATCH, kept_ms)
redis.call('ZADD', BATCHES, now, id)
redis.call('PEXPIRE', BATCHES, kept_ms)
redis.call('ZADD', DUE, 'NX', now, id)
return 1
