-- What lies in the queues, read and nothing written. KEYS: leases, lease meta, dead letters, messages by lease id, then
-- every list asked for, each with the sorted set of the ids that were sorted out of it. ARGV: the mark of the dead
-- letters that the caller knows. Returns {now, per list {length, sorted, enqueue times of the longest there of both, or
-- ''}, leases as {list, held, run out, ...}, mark of the dead letters, the dead letters as
-- {list, reason, count, ...} or nothing where the mark is the caller's}.
local LEASES, META, DEAD, BODIES = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
-- A dead letter carries its message, which may be large: a server must not be held up by counting them.
local DEAD_BYTES_READ = 16 * 1024 * 1024

local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000

-- The pattern cannot match inside a string of the message: there its quotes would be escaped.
local function enqueued_at(body)
  return body and string.match(body, '"enqueued_at":%s*([%d.]+)') or ''
end

local lists = {}
for i = 5, #KEYS, 2 do
  local list, sorted = KEYS[i], KEYS[i + 1]
  local first = redis.call('ZRANGE', sorted, 0, 0)[1]
  lists[#lists + 1] = {
    redis.call('LLEN', list),
    redis.call('ZCARD', sorted),
    enqueued_at(redis.call('LINDEX', list, -1)),
    enqueued_at(first and redis.call('HGET', BODIES, first)),
  }
end

local function list_of(meta)
  return string.sub(meta, string.find(meta, '|', 1, true) + 1)
end

local held, run_out = {}, {}
for _, meta in ipairs(redis.call('HVALS', META)) do
  local list = list_of(meta)
  held[list] = (held[list] or 0) + 1
end
for _, id in ipairs(redis.call('ZRANGEBYSCORE', LEASES, '-inf', now)) do
  local meta = redis.call('HGET', META, id)
  if meta then run_out[list_of(meta)] = (run_out[list_of(meta)] or 0) + 1 end
end
local leases = {}
for list, count in pairs(held) do
  leases[#leases + 1] = list
  leases[#leases + 1] = count
  leases[#leases + 1] = run_out[list] or 0
end

local num_dead = redis.call('LLEN', DEAD)
local mark = num_dead .. ':' .. redis.sha1hex(redis.call('LINDEX', DEAD, 0) or '')
if mark == ARGV[1] then return {tostring(now), lists, leases, mark, false} end
local counts, bytes = {}, 0
for i = 0, num_dead - 1 do
  if bytes > DEAD_BYTES_READ then break end
  local packed = redis.call('LINDEX', DEAD, i)
  bytes = bytes + #packed
  local readable, letter = pcall(cmsgpack.unpack, packed)
  if readable and type(letter) == 'table' then
    local list, reason = tostring(letter.list), tostring(letter.reason)
    counts[list] = counts[list] or {}
    counts[list][reason] = (counts[list][reason] or 0) + 1
  end
end
local dead = {}
for list, reasons in pairs(counts) do
  for reason, count in pairs(reasons) do
    dead[#dead + 1] = list
    dead[#dead + 1] = reason
    dead[#dead + 1] = count
  end
end
return {tostring(now), lists, leases, mark, dead}
