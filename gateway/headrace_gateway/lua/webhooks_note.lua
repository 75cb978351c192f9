-- KEYS: as in webhooks_put.
-- ARGV: event id, token, endpoint, failed attempts or 'done', milliseconds of pause, digest of the URL to disable
-- or '', whether the receiver accepted it (1 or 0), seconds for which a delivered event is remembered, seconds of an
-- event's life. Returns 0 if the claim is lost.
if not is_held(ARGV[1], ARGV[2]) then
  return 0
end
redis.call('EXPIRE', KEYS[2], ARGV[9])
local is_done = ARGV[4] == 'done'
if redis.call('HEXISTS', KEYS[3], ARGV[3]) == 1 then
  redis.call('HSET', KEYS[3], ARGV[3], ARGV[4])
end
if is_done then
  redis.call('ZREM', KEYS[4], ARGV[1])
  local fields, is_open = redis.call('HGETALL', KEYS[3]), false
  for i = 1, #fields, 2 do
    is_open = is_open or (fields[i] ~= '' and fields[i + 1] ~= 'done')
  end
  if not is_open then
    redis.call('EXPIRE', KEYS[3], ARGV[8])
  end
end
local resume = tonumber(redis.call('HGET', KEYS[5], 'resume') or 0)
local pause = tonumber(ARGV[5])
if pause > 0 then
  if resume <= now then -- concurrent attempts count as one pause
    redis.call('HINCRBY', KEYS[5], 'slowed', 1)
  end
  redis.call('HSET', KEYS[5], 'resume', math.max(resume, now + pause))
elseif ARGV[7] == '1' and resume <= now then
  redis.call('HDEL', KEYS[5], 'resume', 'slowed')
end
if ARGV[6] ~= '' then
  redis.call('HSET', KEYS[5], 'disabled', ARGV[6])
end
return 1
