-- KEYS: RESPONSE
-- ARGV: input, kept_seconds
-- A repeat of the request changes nothing.
-- Returns 1 where its end is stored already.
if redis.call('HSETNX', RESPONSE, 'input', input) == 1 then
  redis.call('EXPIRE', RESPONSE, kept_seconds)
end
return redis.call('HEXISTS', RESPONSE, 'state')
