-- Moves the oldest messages of a list that no worker reads to one that workers read.
-- KEYS: KEY, LIST
-- ARGV: most
-- most: how many to move at most. Returns how many it moved. It stops after a mebibyte, so that no call runs long.
local moved, bytes_left = 0, 1024 * 1024
while moved < tonumber(most) and bytes_left > 0 do
  local body = redis.call('LMOVE', KEY, LIST, 'RIGHT', 'LEFT')
  if not body then break end
  moved, bytes_left = moved + 1, bytes_left - #body
end
return moved
