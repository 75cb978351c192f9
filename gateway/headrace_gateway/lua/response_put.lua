-- KEYS: the stored response. ARGV: its input, seconds that it is kept. A repeat of the request changes nothing.
-- Returns 1 where its end is stored already.
if redis.call('HSETNX', KEYS[1], 'input', ARGV[1]) == 1 then
  redis.call('EXPIRE', KEYS[1], ARGV[2])
end
return redis.call('HEXISTS', KEYS[1], 'state')
