-- Counts the dead letters of a queue by reason. Writes nothing. A letter contains its message, which may be large, so one
-- call reads a limited number of them and does not block the server.
-- KEYS: QUEUE
-- ARGV: num_counted
-- num_counted: how many of the newest letters earlier calls have counted.
-- Returns {num_counted for the next call, bytes that this call read, {reason, count, ...}}.
local MOST_LETTERS, MOST_BYTES = 100, 1024 * 1024

local counts, bytes, at = {}, 0, tonumber(num_counted)
local last = at + MOST_LETTERS
while at < last and bytes < MOST_BYTES do
  local packed = redis.pcall('LINDEX', DEAD_LETTERS, at)
  if type(packed) ~= 'string' then break end
  at, bytes = at + 1, bytes + #packed
  local readable, letter = pcall(cmsgpack.unpack, packed)
  if readable and type(letter) == 'table' then
    local reason = tostring(letter.reason)
    counts[reason] = (counts[reason] or 0) + 1
  end
end
local dead = {}
for reason, count in pairs(counts) do
  dead[#dead + 1] = reason
  dead[#dead + 1] = count
end
return {at, bytes, dead}
