-- Shared by the lease scripts. A call is about one queue. A lease id is a hash of its queue and its message
-- (`lease_id_of`), so a message keeps its id and its count of deliveries at every worker. Messages are stored and
-- returned byte for byte.
-- KEYS: QUEUE
-- RIGHTS: LEASES
--
-- Redis does not undo the writes of a script that fails midway. So each script first checks rights and types. If a
-- later write fails all the same, the message is not lost. A script stores the body before it removes the message from
-- its list, deletes the body after it has written it elsewhere, and ends the lease last. A message may then have a
-- record, but neither a lease nor a place in the queue. The reaper returns such messages to their queue.

local DEAD_LETTERS_KEPT = 1000

-- The keys that all messages of the queue need.
do
  local problem = problem_of(LEASES, 'zset') or problem_of(LEASE_BODIES, 'hash') or problem_of(LEASE_META, 'hash')
    or problem_of(LEASE_DELIVERIES, 'hash') or problem_of(DEAD_LETTERS, 'list') or problem_of(LEASE_RECORDS, 'hash')
    or problem_of(LEASE_REQUESTS, 'hash')
  if problem then return {err = problem} end
end

local clock

-- Returns the unix microseconds at the first call.
local function microseconds_now()
  if not clock then
    local time = redis.call('TIME')
    clock = time[1] * 1000000 + time[2]
  end
  return clock
end

local function now()
  return microseconds_now() / 1000000
end

-- Returns the list in a lease's meta value, or nil if it has none.
local function list_of(meta)
  local at = string.find(meta, '|', 1, true)
  return at and at < #meta and string.sub(meta, at + 1) or nil
end

-- Removes a lease id from a sorted set that is only an index. A key of another type cannot contain the id and is not
-- changed.
local function drop(key, id)
  local removed = redis.pcall('ZREM', key, id)
  return type(removed) == 'number' and removed or 0
end

-- Returns the list in which the owner's message arrived; nil if the lease is not, or no longer, the owner's.
local function owned_list(id, owner)
  local meta = redis.call('HGET', LEASE_META, id)
  if meta and string.sub(meta, 1, #owner + 1) == owner .. '|' then return string.sub(meta, #owner + 2) end
end

-- Adds the lease to its list's set of held leases, those of messages that a worker has.
local function hold(list, expires, id)
  redis.pcall('ZADD', held_key(list), expires, id) -- an error is that of a key of another type
end

local function grant(id, owner, list, seconds)
  local expires = now() + seconds
  redis.call('ZADD', LEASES, expires, id)
  hold(list, expires, id)
  redis.call('HSET', LEASE_META, id, owner .. '|' .. list)
end

-- Ends the lease of a message. Its body and its record stay. `list`: that of a lease which a worker holds; nil if the
-- lease's meta value was not read.
local function revoke(id, list)
  redis.call('ZREM', LEASES, id)
  local meta = not list and redis.call('HGET', LEASE_META, id)
  if not (list or meta) then return end
  local named = list or list_of(meta)
  if named then drop(held_key(named), id) end
  if named and not list then drop(delayed_key(named), id) end
  redis.call('HDEL', LEASE_META, id)
end

-- Counts a lease of the message. The number never goes down, so each lease of a message has its own. The caller keeps
-- the record.
local function count_grant(record)
  record.grant = (record.grant or 0) + 1
end

local function queue_of(list)
  local at = string.find(list, PRIORITY_SEPARATOR, 1, true)
  return at and string.sub(list, 1, at - 1) or list
end

local function is_text_or_nil(value) return value == nil or type(value) == 'string' end

local function is_record(record)
  return type(record) == 'table' and type(record.list) == 'string' and queue_of(record.list) == QUEUE
    and type(record.level) == 'string' and queue_of(record.level) == QUEUE
    and type(record.tenant) == 'string' and is_finite(record.since)
    and (not record.charge or is_finite(record.charge) and is_finite(record.weight) and record.weight > 0)
    and is_text_or_nil(record.request) and is_text_or_nil(record.prefix)
    and is_finite(record.skipped or 0) and is_finite(record.preempted or 0) and is_finite(record.sorted or 0)
    and is_finite(record.due or 0) and is_finite(record.first or 0) and is_finite(record.held or 0)
    and is_finite(record.taken or 0) and is_finite(record.choices or 1) and (record.choices or 1) >= 1
    and is_finite(record.deadline or 0) and is_text_or_nil(record.continues) and is_text_or_nil(record.conversation)
    and is_text_or_nil(record.offered) and is_finite(record.grant or 0) and is_finite(record.latest_start or 0)
    and is_finite(record.urgency or 0) and is_text_or_nil(record.at) and is_text_or_nil(record.lost)
    and is_finite(record.unbegun or 0) and is_finite(record.placed or 0)
end

-- Returns the record of a message; nil if there is none, if it is invalid, or if it is of another queue.
local function record_of(id)
  local packed = redis.call('HGET', LEASE_RECORDS, id)
  if not packed then return nil end
  local readable, record = pcall(cmsgpack.unpack, packed)
  return readable and is_record(record) and record or nil
end

-- Returns the lease id of the stored message to which a request id is bound, or nil.
local function holder_of(request)
  local id = redis.call('HGET', LEASE_REQUESTS, request)
  return id and redis.call('HEXISTS', LEASE_BODIES, id) == 1 and id or nil
end

local function unbind(id, record)
  if record and record.request and redis.call('HGET', LEASE_REQUESTS, record.request) == id then
    redis.call('HDEL', LEASE_REQUESTS, record.request)
  end
end

-- Deletes the body and the record of a message, and frees its request id. `record`: nil if it was not read.
local function forget(id, record)
  unbind(id, record or record_of(id))
  redis.call('HDEL', LEASE_BODIES, id)
  redis.call('HDEL', LEASE_RECORDS, id)
end

-- Adds one delivery and returns the count. A count that is not a number, or too large, restarts at 1.
local function count_delivery(id)
  local count = redis.pcall('HINCRBY', LEASE_DELIVERIES, id, 1)
  if type(count) == 'number' and count > 0 then return count end
  redis.call('HSET', LEASE_DELIVERIES, id, 1)
  return 1
end

-- Subtracts one delivery, because a shutdown, a preemption or the message's ETA ended it: that is no fault of the
-- message.
local function uncount_delivery(id)
  local count = redis.pcall('HINCRBY', LEASE_DELIVERIES, id, -1)
  if type(count) ~= 'number' or count <= 0 then redis.call('HDEL', LEASE_DELIVERIES, id) end
end

local function dead_letter(body, list, deliveries, reason)
  local letter = {body = body or '', list = list, deliveries = deliveries, reason = reason, at = now()}
  redis.call('LPUSH', DEAD_LETTERS, cmsgpack.pack(letter))
  redis.call('LTRIM', DEAD_LETTERS, 0, DEAD_LETTERS_KEPT - 1)
end
