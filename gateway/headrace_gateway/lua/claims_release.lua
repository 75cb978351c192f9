-- ARGV: item, token, due_in_ms
-- due_in_ms: '' for never. Returns 0 where it is another's by now.
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
