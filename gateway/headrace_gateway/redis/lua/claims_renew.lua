-- ARGV: held_ms, items[], tokens[]
-- Returns the indexes of lost claims.
local lost = {}
for i, item in ipairs(items) do
  if is_held(item, tokens[i]) then
    redis.call('ZADD', DUE, 'XX', now + tonumber(held_ms), item)
  else
    lost[#lost + 1] = i - 1
  end
end
return lost
