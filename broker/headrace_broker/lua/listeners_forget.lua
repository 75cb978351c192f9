-- Nobody need listen any more to requests that are over. One that is not is another worker's now, and its listeners touch
-- the key on. KEYS: for each request the key of its listeners and the mark of its end.
for i = 1, #KEYS, 2 do
  if redis.call('EXISTS', KEYS[i + 1]) == 1 then redis.call('DEL', KEYS[i]) end
end
