-- ARGV: item, token, due_in_ms
-- due_in_ms: milliseconds until the item is due again; '' removes it. Returns 0 if the claim is lost, else 1.
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
