-- ARGV: held_ms, items[], tokens[]
-- held_ms: milliseconds until the claims expire. Returns the indexes, from 0, of the lost claims.
local lost = {}
for i, item in ipairs(items) do
  if is_held(item, tokens[i]) then
    redis.call('ZADD', DUE, 'XX', now + tonumber(held_ms), item)
  else
    lost[#lost + 1] = i - 1
  end
end
return lost
