-- KEYS: EVENT, UNDELIVERED, ENDPOINT
-- ARGV: id, token, name, failed, pause_ms, disabled, is_taken, remembered_seconds, life_seconds
-- id: of the event. name: of the endpoint. failed: attempts, or 'done'. disabled: digest of the URL to disable, or ''.
-- is_taken: 1 if the receiver accepted it. remembered_seconds: of a delivered event. life_seconds: of an event.
-- Returns 0 if the claim is lost.
if not is_held(id, token) then
  return 0
end
redis.call('EXPIRE', TOKENS, life_seconds)
local is_done = failed == 'done'
if redis.call('HEXISTS', EVENT, name) == 1 then
  redis.call('HSET', EVENT, name, failed)
end
if is_done then
  redis.call('ZREM', UNDELIVERED, id)
  local fields, is_open = redis.call('HGETALL', EVENT), false
  for i = 1, #fields, 2 do
    is_open = is_open or (fields[i] ~= '' and fields[i + 1] ~= 'done')
  end
  if not is_open then
    redis.call('EXPIRE', EVENT, remembered_seconds)
  end
end
local resume = tonumber(redis.call('HGET', ENDPOINT, 'resume') or 0)
local pause = tonumber(pause_ms)
if pause > 0 then
  if resume <= now then -- concurrent attempts count as one pause
    redis.call('HINCRBY', ENDPOINT, 'slowed', 1)
  end
  redis.call('HSET', ENDPOINT, 'resume', math.max(resume, now + pause))
elseif is_taken == '1' and resume <= now then
  redis.call('HDEL', ENDPOINT, 'resume', 'slowed')
end
if disabled ~= '' then
  redis.call('HSET', ENDPOINT, 'disabled', disabled)
end
return 1
