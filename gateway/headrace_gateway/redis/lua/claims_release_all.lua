-- ARGV: due_in_ms, items[], tokens[]
for i, item in ipairs(items) do
  if is_held(item, tokens[i]) then
    redis.call('HDEL', TOKENS, item)
    redis.call('ZADD', DUE, 'XX', now + tonumber(due_in_ms), item)
  end
end
