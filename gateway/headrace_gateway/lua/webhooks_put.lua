-- KEYS[3]: hash of the event. The field '' is the event; the others are endpoints, with failed attempts or 'done'.
-- KEYS[4]: sorted set of the endpoint, undelivered event -> when it was announced, milliseconds.
-- KEYS[5]: hash of the endpoint: disabled (the URL's digest), resume (milliseconds), slowed (pauses since a success).
-- ARGV: event id, endpoint, the event, seconds of its life, digest of the URL. Returns 1 if the delivery is new.
if redis.call('HGET', KEYS[5], 'disabled') == ARGV[5] then
  return 0
end
if redis.call('HSETNX', KEYS[3], ARGV[2], 0) == 0 then
  return 0
end
redis.call('HSETNX', KEYS[3], '', ARGV[3])
redis.call('ZADD', KEYS[1], 'NX', now, ARGV[1])
redis.call('ZADD', KEYS[4], 'NX', now, ARGV[1])
for i = 1, 4 do
  redis.call('EXPIRE', KEYS[i], ARGV[4])
end
return 1
