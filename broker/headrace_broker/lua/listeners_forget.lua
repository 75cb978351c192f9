-- Nobody need listen any more to requests that are over. One that is not is another worker's now, and its listeners touch
-- the key on.
-- KEYS: LISTENER[], ENDED[]
for i, listener in ipairs(LISTENER) do
  if redis.call('EXISTS', ENDED[i]) == 1 then redis.call('DEL', listener) end
end
