-- Shared by the lease scripts. A lease id is the SHA-1 of its message, so a message keeps its id, and with it its
-- count of deliveries, through every queue and every worker. Messages are stored and put back byte for byte.

local LEASES, BODIES, META, DELIVERIES, DEAD, RECORDS = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
-- Request id -> lease id of the first message that came with it. A second one, while the first is known, is a duplicate.
local REQUESTS = LEASES .. ':request'
redis.call('HLEN', REQUESTS) -- a key of another type stops every script here, before it has taken or written anything
local DEAD_LETTERS_KEPT = 1000

local function now()
  local time = redis.call('TIME')
  return time[1] + time[2] / 1000000
end

-- The leases once more, by the list that their messages came from: of those in a worker's hands, and of those whose time
-- has not come. Whoever asks how many there are need not look at each.
local function held_from(list) return LEASES .. ':held:' .. list end
local function delayed_from(list) return LEASES .. ':delayed:' .. list end

local function list_of(meta)
  return string.sub(meta, string.find(meta, '|', 1, true) + 1)
end

-- The list that the owner's message came from; nil where the lease is not, or no longer, the owner's.
local function owned_list(id, owner)
  local meta = redis.call('HGET', META, id)
  if meta and string.sub(meta, 1, #owner + 1) == owner .. '|' then return string.sub(meta, #owner + 2) end
end

local function grant(id, owner, list, seconds)
  local expires = now() + seconds
  redis.call('ZADD', LEASES, expires, id)
  redis.call('ZADD', held_from(list), expires, id)
  redis.call('HSET', META, id, owner .. '|' .. list)
end

-- Nobody holds the message any more. It is still known, as one that waits.
local function revoke(id)
  redis.call('ZREM', LEASES, id)
  local meta = redis.call('HGET', META, id)
  if not meta then return end
  redis.call('ZREM', held_from(list_of(meta)), id)
  redis.call('ZREM', delayed_from(list_of(meta)), id)
  redis.call('HDEL', META, id)
end

-- What is known of a message; nil where nothing is.
local function record_of(id)
  local packed = redis.call('HGET', RECORDS, id)
  return packed and cmsgpack.unpack(packed)
end

-- The lease id of the message that a request id is bound to, as long as that message is known; nil where there is none.
local function holder_of(request)
  local id = redis.call('HGET', REQUESTS, request)
  return id and redis.call('HEXISTS', BODIES, id) == 1 and id or nil
end

local function unbind(id, record)
  if record and record.request and redis.call('HGET', REQUESTS, record.request) == id then
    redis.call('HDEL', REQUESTS, record.request)
  end
end

-- The message is known no more, and its request id is free.
local function forget(id)
  unbind(id, record_of(id))
  redis.call('HDEL', BODIES, id)
  redis.call('HDEL', RECORDS, id)
end

-- The delivery does not count: it was ended by the fleet, or by the message's own ETA, and says nothing of the message.
local function take_back_strike(id)
  if redis.call('HINCRBY', DELIVERIES, id, -1) <= 0 then redis.call('HDEL', DELIVERIES, id) end
end

local function bury(body, list, deliveries, reason)
  local letter = {body = body, list = list, deliveries = deliveries, reason = reason, at = now()}
  redis.call('LPUSH', DEAD, cmsgpack.pack(letter))
  redis.call('LTRIM', DEAD, 0, DEAD_LETTERS_KEPT - 1)
end
