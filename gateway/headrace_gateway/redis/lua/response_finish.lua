-- KEYS: TOKENS, RESPONSE, ENVELOPE
-- RIGHTS: RESPONSE
-- ARGV: item, token, state, kept_seconds, stream_seconds, has_run
-- Returns 0 if the claim is lost, the stored state if there is one already, else 1.
if redis.call('HGET', TOKENS, item) ~= token then
  return 0
end
if redis.call('EXISTS', RESPONSE, ENVELOPE) < 2 then -- it was deleted, or is not to be stored
  if redis.call('TTL', ENVELOPE) > tonumber(stream_seconds) then
    redis.call('EXPIRE', ENVELOPE, stream_seconds)
  end
  return 1
end
if redis.call('HSETNX', RESPONSE, 'state', state) == 0 then
  return redis.call('HGET', RESPONSE, 'state')
end
if has_run == '0' then
  redis.call('HDEL', RESPONSE, 'input')
end
redis.call('EXPIRE', RESPONSE, kept_seconds)
redis.call('EXPIRE', ENVELOPE, kept_seconds)
return 1
