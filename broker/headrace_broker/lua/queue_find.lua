-- Looks for a request in one list of a queue, read and nothing written, some messages at a time so that it does not hold
-- up the server.
-- KEYS: KEY
-- ARGV: id, num_seen
-- KEY: the list, or a sorted set of lease ids. id: of the request, as JSON. num_seen: how many have been looked at.
-- Returns {1 if it is there, how many have been looked at or -1 where all have}.
local LOOKED_AT, MOST_BYTES = 200, 4 * 1024 * 1024

local kind, at, bytes = redis.call('TYPE', KEY).ok, tonumber(num_seen), 0
if kind ~= 'list' and kind ~= 'zset' then return {0, -1} end
for place = at, at + LOOKED_AT - 1 do
  local body
  if kind == 'list' then -- from where it is taken, as others are put before the first
    body = redis.call('LINDEX', KEY, -1 - place)
    if not body then return {0, -1} end
  else
    local lease = redis.call('ZRANGE', KEY, place, place)[1]
    if not lease then return {0, -1} end
    body = redis.pcall('HGET', LEASE_BODIES, lease)
    body = type(body) == 'string' and body or ''
  end
  if string.find(body, id, 1, true) then return {1, -1} end
  bytes = bytes + #body
  if bytes > MOST_BYTES then return {0, place + 1} end
end
return {0, at + LOOKED_AT}
