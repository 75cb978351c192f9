-- KEYS: the five lease keys. ARGV: owner, ids. Returns how many of them were still the owner's.
local acked = 0
for i = 2, #ARGV do
  if owned_list(ARGV[i], ARGV[1]) then
    revoke(ARGV[i])
    redis.call('HDEL', DELIVERIES, ARGV[i])
    acked = acked + 1
  end
end
return acked
