-- Counts the messages of a queue, at a cost that does not grow with their number. Writes nothing. An unsorted message is
-- in the list to which its producer pushed it, or in the list's `arrived` list. A sorted one has been moved from there
-- to sorted sets by a worker.
-- KEYS: QUEUE, LIST[], ARRIVED[], SORTED_IDS[], HELD[], DELAYED[]
-- Returns {unix seconds now, a string that changes when the dead letters change, levels}. levels: for each list {number
-- of unsorted messages, of sorted ones, of messages that workers hold, of delayed ones, of expired leases; enqueue time
-- of the oldest unsorted message or '', enqueue time of the oldest sorted message or '', digest of the oldest unsorted
-- message or '', unix microseconds at which the oldest sorted message began to wait or ''}. Enqueue times are in unix
-- seconds. A key of the wrong type counts as empty; wrong_keys.lua reports it.
local MARK_BYTES = 4096 -- at the end of a message, after its prompt: enough to tell it from others

local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000

-- Returns the number in Redis's reply, or 0 if Redis refuses the command.
local function count(...)
  local reply = redis.pcall(...)
  return type(reply) == 'number' and reply or 0
end

-- Returns the string in Redis's reply, or nil.
local function text(...)
  local reply = redis.pcall(...)
  return type(reply) == 'string' and reply or nil
end

-- The pattern cannot match inside a string of the message, where its quotes would be escaped.
local function enqueued_at(body)
  local at = body and string.find(body, '"enqueued_at":', 1, true)
  return at and string.match(body, '^"enqueued_at":%s*([%d.]+)', at) or ''
end

-- Returns when a message began to wait, in unix microseconds: when it was first sorted, or when it became due if it was
-- delayed; '' if unknown.
local function waits_since(id)
  local packed = id and text('HGET', LEASE_RECORDS, id)
  local readable, record = pcall(cmsgpack.unpack, packed or '')
  local sorted = packed and readable and type(record) == 'table' and record.sorted
  if not is_finite(sorted) then return '' end
  return string.format('%.0f', is_finite(record.due) and math.max(sorted, record.due) or sorted)
end

local lists = {}
for i, list in ipairs(LIST) do
  local arrived, sorted, held, delayed = ARRIVED[i], SORTED_IDS[i], HELD[i], DELAYED[i]
  local first = redis.pcall('ZRANGE', sorted, 0, 0)[1]
  local oldest = text('LINDEX', arrived, -1) or text('LINDEX', list, -1)
  lists[#lists + 1] = {
    count('LLEN', list) + count('LLEN', arrived),
    count('ZCARD', sorted),
    count('ZCARD', held),
    count('ZCARD', delayed),
    count('ZCOUNT', held, '-inf', now) + count('ZCOUNT', delayed, '-inf', now),
    enqueued_at(oldest),
    enqueued_at(first and text('HGET', LEASE_BODIES, first)),
    oldest and redis.sha1hex(#oldest .. string.sub(oldest, -MARK_BYTES)) or '',
    waits_since(first),
  }
end

local num_dead = count('LLEN', DEAD_LETTERS)
local mark = num_dead .. ':' .. redis.sha1hex(text('LINDEX', DEAD_LETTERS, 0) or '')
return {string.format('%.6f', now), mark, lists}
