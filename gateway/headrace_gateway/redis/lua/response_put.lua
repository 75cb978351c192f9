-- KEYS: RESPONSE
-- RIGHTS: RESPONSE
-- ARGV: input, kept_seconds
-- Repeating it has no effect. Returns 1 if the end of the response is stored already.
if redis.call('HSETNX', RESPONSE, 'input', input) == 1 then
  redis.call('EXPIRE', RESPONSE, kept_seconds)
end
return redis.call('HEXISTS', RESPONSE, 'state')
