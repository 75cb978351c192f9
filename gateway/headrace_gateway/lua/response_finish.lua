-- KEYS: hash, item -> the token of whoever holds it; the stored response; its envelope.
-- ARGV: item, token, the response's state, seconds that it is kept, seconds that a stream is kept.
-- Returns 0 where the claim is another's by now, and else 1, or the state where one was stored before.
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then
  return 0
end
if redis.call('EXISTS', KEYS[2], KEYS[3]) < 2 then -- it was deleted, or is not to be stored
  if redis.call('TTL', KEYS[3]) > tonumber(ARGV[5]) then
    redis.call('EXPIRE', KEYS[3], ARGV[5])
  end
  return 1
end
if redis.call('HSETNX', KEYS[2], 'state', ARGV[3]) == 0 then
  return redis.call('HGET', KEYS[2], 'state')
end
redis.call('EXPIRE', KEYS[2], ARGV[4])
redis.call('EXPIRE', KEYS[3], ARGV[4])
return 1
