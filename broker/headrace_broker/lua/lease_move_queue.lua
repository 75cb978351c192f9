-- Moves messages from the keys of an earlier version to the keys of the queue (`earlier_version.py`).
-- KEYS: LIST[]
-- ARGV: most
-- LIST: the lists of the queue. most: how many messages to move at most. Returns 1 if it moved anything, else 0.
-- A message that a worker of an earlier version holds is not moved before its lease expires. Each message is stored in its
-- new place before it is removed from its old one, so a write that fails loses nothing.
local LETTERS_MOVED, ORPHANS_CHECKED = 50, 20
local left, bytes_left = tonumber(most), 4 * 1024 * 1024
local has_moved = 0

-- Removes a message of an earlier version from all keys. A worker of an earlier version also removes ids that it does not find.
local function remove_old(id, list, record)
  local level, tenant = record and record.level or list, record and record.tenant or ''
  redis.call('ZREM', old_sorted_ids_key(level), id)
  redis.call('ZREM', old_tenant_deadlines_key(level, tenant), id)
  redis.call('ZREM', OLD_DEADLINES, id)
  if redis.call('ZREM', old_tenant_ids_key(level, tenant), id) == 1
    and tonumber(redis.call('ZINCRBY', OLD_WAITING, -1, tenant)) <= 0 then
    redis.call('ZREM', OLD_WAITING, tenant)
  end
  if redis.call('EXISTS', old_tenant_ids_key(level, tenant)) == 0 then
    redis.call('ZREM', old_tenants_key(level), tenant)
  end
  if record and record.delayed and tonumber(redis.call('ZINCRBY', OLD_DELAYED_TENANTS, -1, tenant)) <= 0 then
    redis.call('ZREM', OLD_DELAYED_TENANTS, tenant)
  end
  if record and record.request and redis.call('HGET', OLD_LEASE_REQUESTS, record.request) == id then
    redis.call('HDEL', OLD_LEASE_REQUESTS, record.request)
  end
  redis.call('ZREM', OLD_LEASES, id)
  for _, key in ipairs({old_held_key(list), old_delayed_key(list)}) do redis.call('ZREM', key, id) end
  for _, key in ipairs({OLD_LEASE_META, OLD_LEASE_DELIVERIES, OLD_LEASE_RECORDS, OLD_LEASE_BODIES}) do
    redis.call('HDEL', key, id)
  end
end

local function old_record_of(id)
  local readable, record = pcall(cmsgpack.unpack, redis.call('HGET', OLD_LEASE_RECORDS, id) or '')
  return readable and is_record(record) and record or nil
end

-- Stores a message under the keys of the queue. due: until when it is delayed, or nil.
local function store(id, record, due)
  local since_taken = record.taken
  if record.charge then add_service(record, -record.charge) end
  record.charge, record.weight, record.offered, record.delayed = nil, nil, nil, nil
  if since_taken then wait_again(record, false) end
  if due then
    redis.call('ZADD', LEASES, due, id)
    redis.call('ZADD', delayed_key(record.list), due, id)
    redis.call('HSET', LEASE_META, id, 'delayed|' .. record.list)
    delay(id, record)
  else
    keep(id, record)
    enter(id, record)
  end
end

-- Moves the message of the older release with this lease id, which is in the list or arrived in it.
local function move(id, list, due)
  local record, body = old_record_of(id), redis.call('HGET', OLD_LEASE_BODIES, id)
  left, has_moved = left - 1, 1
  if body then
    local now_id, deliveries = lease_id_of(body, QUEUE), redis.call('HGET', OLD_LEASE_DELIVERIES, id)
    bytes_left = bytes_left - #body
    local is_known = redis.call('HEXISTS', LEASE_BODIES, now_id) == 1 -- sent again: its own count stays
    if deliveries and not is_known then redis.call('HSET', LEASE_DELIVERIES, now_id, deliveries) end
    if not record or record.refused or is_known
      or record.request and holder_of(record.request) then
      redis.call('RPUSH', record and record.list or list, body) -- the next fetch judges it
    else
      redis.call('HSET', LEASE_BODIES, now_id, body)
      if record.request then redis.call('HSET', LEASE_REQUESTS, record.request, now_id) end
      store(now_id, record, due)
    end
  end
  remove_old(id, list, record)
end

local function move_all(ids, list)
  for i = 1, #ids, 2 do
    if left <= 0 or bytes_left <= 0 then return end
    move(ids[i], list)
  end
end

for _, list in ipairs(LIST) do
  local problem = problem_of_list(list) or problem_of(list, 'list') or problem_of(delayed_key(list), 'zset')
  if problem then return {err = problem} end
end
local mean = redis.call('HGET', OLD_MEAN_COST, QUEUE)
if mean then redis.call('SET', MEAN_COST, mean, 'EX', SHARE_SECONDS, 'NX') end
for _, list in ipairs(LIST) do
  local virtual_time = redis.call('HGET', OLD_VIRTUAL_TIME, list)
  if virtual_time and redis.call('HSETNX', VIRTUAL_TIME, list, virtual_time) == 1 then
    redis.call('EXPIRE', VIRTUAL_TIME, SHARE_SECONDS)
  end
  while redis.call('LMOVE', old_arrived_key(list), list, 'LEFT', 'RIGHT') do has_moved = 1 end
end
for _, list in ipairs(LIST) do
  move_all(redis.call('ZRANGE', old_sorted_ids_key(list), 0, math.max(left, 1) - 1, 'WITHSCORES'), list)
  move_all(redis.call('ZRANGEBYSCORE', old_held_key(list), '-inf', now(), 'WITHSCORES', 'LIMIT', 0, math.max(left, 1)), list)
  local delayed = redis.call('ZRANGE', old_delayed_key(list), 0, math.max(left, 1) - 1, 'WITHSCORES')
  for i = 1, #delayed, 2 do
    if left > 0 and bytes_left > 0 then move(delayed[i], list, tonumber(delayed[i + 1])) end
  end
end

-- A script that failed midway, or keys that were deleted by hand, leave messages that are neither leased nor waiting.
for _, id in ipairs(redis.call('HRANDFIELD', OLD_LEASE_BODIES, ORPHANS_CHECKED)) do
  local record = old_record_of(id)
  if record and not redis.call('ZSCORE', OLD_LEASES, id) and not redis.call('ZSCORE', old_sorted_ids_key(record.level), id) then
    move(id, record.list)
  end
end
if redis.call('EXISTS', OLD_LEASE_BODIES) == 0 then
  redis.call('DEL', OLD_LEASES, OLD_LEASE_RECORDS, OLD_LEASE_META, OLD_LEASE_DELIVERIES, OLD_LEASE_REQUESTS)
  local waits = false
  for _, list in ipairs(LIST) do waits = waits or redis.call('EXISTS', old_sorted_ids_key(list)) == 1 end
  if not waits then redis.call('DEL', OLD_WAKE_UP, OLD_HOLDERS) end
end

-- Dead letters of all queues are in one list. Its newest go first, behind those that are newer than all of them.
for _ = 1, LETTERS_MOVED do
  local letter = redis.call('LINDEX', OLD_DEAD_LETTERS, 0)
  if not letter or bytes_left <= 0 then break end
  local readable, content = pcall(cmsgpack.unpack, letter)
  local list = readable and type(content) == 'table' and content.list
  local queue = type(list) == 'string' and list ~= '' and queue_of(list) or QUEUE
  redis.call('RPUSH', dead_letters_key(queue), letter)
  redis.call('LTRIM', dead_letters_key(queue), 0, DEAD_LETTERS_KEPT - 1)
  redis.call('LPOP', OLD_DEAD_LETTERS)
  bytes_left, has_moved = bytes_left - #letter, 1
end
return has_moved
