-- What lies in the queues, read and nothing written, at a cost that does not grow with it.
-- KEYS: LIST[], SORTED_IDS[], HELD[], DELAYED[]
-- Returns {now, mark of the dead letters, which is
-- another one when they have changed, per list {length, sorted, held, delayed, run out, enqueue times of the longest
-- there of the first two, or '', a mark of the first of these, or '', since when the second waits in microseconds, or
-- ''}}. A key of the wrong type counts as empty; wrong_keys.lua names it.
local TELLING_BYTES = 4096 -- of a message, behind its prompt: enough to know it again

local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000

-- A number that Redis replies, or 0 where it refuses.
local function count(...)
  local reply = redis.pcall(...)
  return type(reply) == 'number' and reply or 0
end

-- A text that Redis replies, or nil.
local function text(...)
  local reply = redis.pcall(...)
  return type(reply) == 'string' and reply or nil
end

-- The text cannot be found inside a string of the message: there its quotes would be escaped.
local function enqueued_at(body)
  local at = body and string.find(body, '"enqueued_at":', 1, true)
  return at and string.match(body, '^"enqueued_at":%s*([%d.]+)', at) or ''
end

-- Since when a message waits: since it was first sorted, or since its time where it had one of its own.
local function waits_since(id)
  local packed = id and text('HGET', LEASE_RECORDS, id)
  local readable, record = pcall(cmsgpack.unpack, packed or '')
  local sorted = packed and readable and type(record) == 'table' and record.sorted
  if not is_finite(sorted) then return '' end
  return string.format('%.0f', is_finite(record.due) and math.max(sorted, record.due) or sorted)
end

local lists = {}
for i, list in ipairs(LIST) do
  local sorted, held, delayed = SORTED_IDS[i], HELD[i], DELAYED[i]
  local first = redis.pcall('ZRANGE', sorted, 0, 0)[1]
  local oldest = text('LINDEX', list, -1)
  lists[#lists + 1] = {
    count('LLEN', list),
    count('ZCARD', sorted),
    count('ZCARD', held),
    count('ZCARD', delayed),
    count('ZCOUNT', held, '-inf', now) + count('ZCOUNT', delayed, '-inf', now),
    enqueued_at(oldest),
    enqueued_at(first and text('HGET', LEASE_BODIES, first)),
    oldest and redis.sha1hex(#oldest .. string.sub(oldest, -TELLING_BYTES)) or '',
    waits_since(first),
  }
end

local num_dead = count('LLEN', DEAD_LETTERS)
local mark = num_dead .. ':' .. redis.sha1hex(text('LINDEX', DEAD_LETTERS, 0) or '')
return {string.format('%.6f', now), mark, lists}
