-- KEYS: DELIVERY, UNDELIVERED
-- ARGV: id, delivery, life_seconds
-- id: the event's id. Returns 1 if the delivery is new, else 0.
if not redis.call('SET', DELIVERY, delivery, 'NX', 'EX', life_seconds) then
  return 0
end
for _, key in ipairs({DUE, UNDELIVERED}) do
  redis.call('ZADD', key, 'NX', now, id)
  redis.call('EXPIRE', key, life_seconds)
end
redis.call('EXPIRE', TOKENS, life_seconds)
return 1
