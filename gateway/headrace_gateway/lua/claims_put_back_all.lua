-- ARGV: milliseconds until they are due again, then each item with its token.
for i = 2, #ARGV, 2 do
  if is_held(ARGV[i], ARGV[i + 1]) then
    redis.call('HDEL', KEYS[2], ARGV[i])
    redis.call('ZADD', KEYS[1], 'XX', now + tonumber(ARGV[1]), ARGV[i])
  end
end
