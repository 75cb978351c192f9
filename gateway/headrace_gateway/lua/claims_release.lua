-- ARGV: item, token, milliseconds until it is due again; '': remove it. Returns 0 if the claim is lost.
if not is_held(ARGV[1], ARGV[2]) then
  return 0
end
redis.call('HDEL', KEYS[2], ARGV[1])
if ARGV[3] == '' then
  redis.call('ZREM', KEYS[1], ARGV[1])
else
  redis.call('ZADD', KEYS[1], 'XX', now + tonumber(ARGV[3]), ARGV[1])
end
return 1
