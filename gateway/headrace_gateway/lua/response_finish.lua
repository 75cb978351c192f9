-- KEYS: the tokens of the claims, a hash; the stored response; its envelope.
-- ARGV: item, token, the response's state, seconds for which it is stored, seconds for which a stream is kept.
-- Returns 0 if the claim is lost, the stored state if there is one already, else 1.
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
