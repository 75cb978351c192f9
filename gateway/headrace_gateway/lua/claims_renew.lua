-- ARGV: milliseconds for which to renew, then each item with its token. Returns the indexes of lost claims.
local lost = {}
for i = 2, #ARGV, 2 do
  if is_held(ARGV[i], ARGV[i + 1]) then
    redis.call('ZADD', KEYS[1], 'XX', now + tonumber(ARGV[1]), ARGV[i])
  else
    lost[#lost + 1] = i / 2 - 1
  end
end
return lost
