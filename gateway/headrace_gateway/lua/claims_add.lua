-- ARGV: item, milliseconds until it is due. Returns 1 if it is new.
return redis.call('ZADD', KEYS[1], 'NX', now + tonumber(ARGV[2]), ARGV[1])
