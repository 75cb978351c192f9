-- What lies in the queues, read and nothing written, at a cost that does not grow with it. KEYS: dead letters, messages by
-- lease id, then four for every list asked for: the list, the ids that were sorted out of it, and of the leases of its
-- messages those in a worker's hands and the delayed ones. Returns {now, mark of the dead letters, which is another one
-- when they have changed, per list {length, sorted, held, delayed, run out, enqueue times of the longest there of the
-- first two, or ''}}. A key of the wrong type counts as empty; wrong_keys.lua names it.
local DEAD, BODIES = KEYS[1], KEYS[2]

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

local lists = {}
for i = 3, #KEYS, 4 do
  local list, sorted, held, delayed = KEYS[i], KEYS[i + 1], KEYS[i + 2], KEYS[i + 3]
  local first = redis.pcall('ZRANGE', sorted, 0, 0)[1]
  lists[#lists + 1] = {
    count('LLEN', list),
    count('ZCARD', sorted),
    count('ZCARD', held),
    count('ZCARD', delayed),
    count('ZCOUNT', held, '-inf', now) + count('ZCOUNT', delayed, '-inf', now),
    enqueued_at(text('LINDEX', list, -1)),
    enqueued_at(first and text('HGET', BODIES, first)),
  }
end

local num_dead = count('LLEN', DEAD)
local mark = num_dead .. ':' .. redis.sha1hex(text('LINDEX', DEAD, 0) or '')
return {tostring(now), mark, lists}
