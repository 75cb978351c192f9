-- KEYS: EVENT, UNDELIVERED, ENDPOINT
-- ARGV: id, name, event, life_seconds, digest
-- id: of the event. name: of the endpoint. digest: of its URL. Returns 1 if the delivery is new.
if redis.call('HGET', ENDPOINT, 'disabled') == digest then
  return 0
end
if redis.call('HSETNX', EVENT, name, 0) == 0 then
  return 0
end
redis.call('HSETNX', EVENT, '', event)
redis.call('ZADD', DUE, 'NX', now, id)
redis.call('ZADD', UNDELIVERED, 'NX', now, id)
for _, key in ipairs({DUE, TOKENS, EVENT, UNDELIVERED}) do
  redis.call('EXPIRE', key, life_seconds)
end
return 1
