-- Searches one list of a queue for a request. Writes nothing. One call reads a limited number of messages, so that it
-- does not block the server.
-- KEYS: QUEUE, KEY
-- ARGV: id, num_seen
-- KEY: the list, or a sorted set of lease ids. id: the request id as JSON. num_seen: how many messages earlier calls
-- read.
-- Returns {1 if the request was found else 0, num_seen for the next call or -1 if the search is over}.
local LOOKED_AT, MOST_BYTES = 200, 4 * 1024 * 1024

local kind, at, bytes = redis.call('TYPE', KEY).ok, tonumber(num_seen), 0
if kind ~= 'list' and kind ~= 'zset' then return {0, -1} end
for place = at, at + LOOKED_AT - 1 do
  local body
  if kind == 'list' then -- from the end that is popped, as new messages are added at the other end
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
