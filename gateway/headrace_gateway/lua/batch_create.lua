-- KEYS: the batch, a hash; the batches of its API key, a sorted set by creation; the work items by due time.
-- ARGV: id, milliseconds for which it is stored, maximum of open batches, maximum of stored batches, prefix of a
-- batch's key, fields and values. Returns 0 if too many batches of the API key are open.
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local has_ended = {completed = true, failed = true, expired = true, cancelled = true}
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now - tonumber(ARGV[2]))
local ids = redis.call('ZRANGE', KEYS[2], 0, -1)
local ended = {}
local open = 0
for _, id in ipairs(ids) do
  local status = redis.call('HGET', ARGV[5] .. id, 'status')
  if not status or has_ended[status] then
    ended[#ended + 1] = id
  else
    open = open + 1
  end
end
if open >= tonumber(ARGV[3]) then
  return 0
end
for i = 1, math.min(#ended, #ids + 1 - tonumber(ARGV[4])) do
  redis.call('ZREM', KEYS[2], ended[i])
  redis.call('DEL', ARGV[5] .. ended[i])
end
for i = 6, #ARGV, 2 do
  redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
redis.call('ZADD', KEYS[2], now, ARGV[1])
redis.call('PEXPIRE', KEYS[2], ARGV[2])
redis.call('ZADD', KEYS[3], 'NX', now, ARGV[1])
return 1
