-- Adds a row of the usage ledger to another row of its bucket, and deletes it.
-- KEYS: USAGE
-- RIGHTS: USAGE
-- ARGV: row, other
-- Returns 1, or 0 if there is no such row.
local value = redis.call('HGET', USAGE, row)
if not value then return 0 end
-- Returns the numbers of a value, which may have been edited by hand.
local function numbers_in(packed)
  local readable, found = pcall(cmsgpack.unpack, packed)
  local numbers = {}
  for i, number in ipairs(readable and type(found) == 'table' and found or {}) do numbers[i] = tonumber(number) or 0 end
  return numbers
end

local sums = numbers_in(redis.call('HGET', USAGE, other) or cmsgpack.pack({}))
for i, count in ipairs(numbers_in(value)) do sums[i] = (sums[i] or 0) + count end
redis.call('HSET', USAGE, other, cmsgpack.pack(sums))
redis.call('HDEL', USAGE, row)
return 1
