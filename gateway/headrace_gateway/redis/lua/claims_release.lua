-- ARGV: item, token, due_in_ms
-- due_in_ms: '' removes the item. Returns 0 if the claim is lost.
if not is_held(item, token) then
  return 0
end
redis.call('HDEL', TOKENS, item)
if due_in_ms == '' then
  redis.call('ZREM', DUE, item)
else
  redis.call('ZADD', DUE, 'XX', now + tonumber(due_in_ms), item)
end
return 1
