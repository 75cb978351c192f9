-- KEYS: hash, item -> the token of whoever holds it; the stored response; its envelope.
-- ARGV: item, token, the response's state, seconds that it is kept. Returns 0 where the claim is another's by now.
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then
  return 0
end
if redis.call('EXISTS', KEYS[2], KEYS[3]) == 2 then -- else it was deleted, or is not to be stored
  redis.call('HSETNX', KEYS[2], 'state', ARGV[3])
  redis.call('EXPIRE', KEYS[2], ARGV[4])
  redis.call('EXPIRE', KEYS[3], ARGV[4])
end
return 1
