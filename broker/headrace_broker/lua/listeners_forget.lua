-- Deletes the heartbeat keys of requests that have ended. The others belong to another worker now and keep their keys.
-- KEYS: LISTENER[], ENDED[]
for i, listener in ipairs(LISTENER) do
  if redis.call('EXISTS', ENDED[i]) == 1 then redis.call('DEL', listener) end
end
