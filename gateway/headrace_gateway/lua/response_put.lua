-- KEYS: the stored response. ARGV: its input, seconds for which it is kept. Repeating it has no effect.
-- Returns 1 if the end of the response is stored already.
if redis.call('HSETNX', KEYS[1], 'input', ARGV[1]) == 1 then
  redis.call('EXPIRE', KEYS[1], ARGV[2])
end
return redis.call('HEXISTS', KEYS[1], 'state')
