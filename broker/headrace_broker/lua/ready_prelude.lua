-- Sorted messages, and the service that each tenant has received. Requires lease_prelude.
--
-- A queue has one Redis list for each priority step. A message arrives in one of these lists. If an idle worker waits
-- for the list, Redis moves the message to the list's `arrived` list and wakes that worker. A fetch sorts the message:
-- the script moves it to two sorted sets, one for all messages of the list and one for its tenant's messages of the
-- list. When the message has aged, it moves to the two sets of the next higher priority.
--
-- Each list is served by start-time fair queueing (Goyal, Vin, Cheng 1996): a tenant's service is its tokens divided by
-- its weight. The tenant with the least service is next. A tenant gains nothing by idle time: when it has messages
-- again, it starts at the list's virtual time or, if it has received more, at its own service.
--
-- Each sorted message has a record while it waits and while it is leased. Times are in unix microseconds. Its fields:
--   list: the list where it arrived; level: the list where it waits, or waited before its lease; tenant: '' for none
--   request: the request id bound to it, or nil; prefix: a hash of its prompt's beginning, or nil
--   since: the time that orders it among its tenant's messages in `level`; first: the same in `list`, if it has aged
--   sorted: when it was first sorted; due: when it became due, if it was delayed; delayed: true until it is due
--   grant: how often it was leased, or a higher number that `lease_regrant` gave; nil if never by this version
--   taken: when it was leased, while it is; held: microseconds after `since` that do not count in its age
--   charge: expected tokens that its tenant was charged at the lease; weight: the tenant's weight at that time
--   deadline: when it expires, or nil
--   latest_start: when it must be leased to end when it is due by its header `due`, or nil; urgency: URGENT once that
--   time has come, LATE when it can no longer end in time, or nil
--   choices: number of choices that its header or a worker gave, or nil for one; refused: true if it exceeds the quota
--   continues: the conversation that it continues, or nil; conversation: the one that later requests may continue, or nil
--   at: name of the stream server of its request, its home; nil if the stream is on the main server
--   lost: the stream server that has lost its begun stream, or nil; placed: when `at` was chosen again, or nil
--   unbegun: how many of its leases ended before its stream could begin, or nil
--   offered: the worker to which it was offered as the holder of its conversation, or nil
--   skipped: how often affinity preferred a later message; preempted: how often it made room for a higher priority

local MOST_TENANTS = 1000
local FIRST_ESTIMATE = 256 -- tokens of a request before any request of the queue has ended
local NEWEST_COST = 0.2 -- weight of the newest cost in the moving average

-- Returns the problem that blocks all messages of a list, or nil.
local function problem_of_list(list)
  return problem_of(sorted_ids_key(list), 'zset') or problem_of(tenants_key(list), 'zset')
    or problem_of(served_key(list), 'zset') or problem_of(WAITING, 'zset')
    or problem_of(DEADLINES, 'zset') or problem_of(LATEST_STARTS, 'zset')
    or problem_of(DELAYED_TENANTS, 'zset') or problem_of(COSTS, 'zset')
    or problem_of(VIRTUAL_TIME, 'hash') or problem_of(MEAN_COST, 'string')
end

-- Returns the problem that blocks all messages of a tenant in a list, or nil.
local function problem_of_tenant(list, tenant)
  return problem_of(tenant_ids_key(list, tenant), 'zset') or problem_of(tenant_deadlines_key(list, tenant), 'zset')
    or problem_of(tenant_starts_key(list, tenant), 'zset')
end

-- Returns the problem that blocks the place in the queue that this record names, or nil.
local function problem_of_place(record)
  return problem_of_list(record.level) or problem_of_tenant(record.level, record.tenant)
end

local function keep(id, record)
  redis.call('HSET', LEASE_RECORDS, id, cmsgpack.pack(record))
end

-- Records that the message is delayed. Until it is due, the tenant's quota counts it as waiting.
local function delay(id, record)
  record.delayed = true
  keep(id, record)
  redis.call('ZINCRBY', DELAYED_TENANTS, 1, record.tenant)
end

-- Records that the message is no longer delayed: it is due, or it was taken or deleted.
local function undelay(id, record)
  if not record or not record.delayed then return end
  record.delayed = nil
  keep(id, record)
  if problem_of(DELAYED_TENANTS, 'zset') then return end
  if tonumber(redis.call('ZINCRBY', DELAYED_TENANTS, -1, record.tenant)) <= 0 then
    redis.call('ZREM', DELAYED_TENANTS, record.tenant)
  end
end

-- Returns the service at which a new tenant starts: the virtual time (the highest service at which a message was
-- taken), or the least service of a waiting tenant. The latter is lower if that tenant's messages cost less than
-- estimated.
local function floor_at(list)
  local virtual_time = number_in(redis.call('HGET', VIRTUAL_TIME, list), 0)
  local least = redis.call('ZRANGE', tenants_key(list), 0, 0, 'WITHSCORES')[2]
  return math.min(virtual_time, number_in(least, virtual_time))
end

-- The urgency of a message is subtracted from its score among those of its tenant. All times in microseconds are less.
local URGENT, LATE = 1.8e16, 9e15

-- Returns the score that orders a message among those of its tenant: urgent ones are first, and late ones next. One that
-- has aged into a higher priority is not before those that were sent with it.
local function order_of(record)
  local is_first = record.latest_start and record.urgency and record.level == record.list
  return is_first and record.latest_start - record.urgency or record.since
end

local function enter(id, record)
  local list, tenant = record.level, record.tenant
  redis.call('ZADD', tenant_ids_key(list, tenant), order_of(record), id)
  redis.call('ZADD', sorted_ids_key(list), record.since + (record.held or 0), id) -- it ages from this time on
  redis.call('ZINCRBY', WAITING, 1, tenant)
  if record.deadline then
    redis.call('ZADD', DEADLINES, record.deadline, id)
    redis.call('ZADD', tenant_deadlines_key(list, tenant), record.deadline, id)
  end
  if record.latest_start and record.urgency ~= LATE then redis.call('ZADD', LATEST_STARTS, record.latest_start, id) end
  if record.latest_start and not record.urgency then
    redis.call('ZADD', tenant_starts_key(list, tenant), record.latest_start, id)
  end
  if not redis.call('ZSCORE', tenants_key(list), tenant) then
    local served = number_in(redis.call('ZSCORE', served_key(list), tenant), 0)
    redis.call('ZADD', tenants_key(list), math.max(served, floor_at(list)), tenant)
  end
end

local function leave(id, record)
  undelay(id, record) -- a worker of an earlier version may have returned it to the queue, and does not do this
  local list, tenant = record.level, record.tenant
  local was_there = drop(tenant_ids_key(list, tenant), id)
  redis.call('ZREM', sorted_ids_key(list), id)
  -- without `since` the record is not known
  if record.deadline or not record.since then
    redis.call('ZREM', DEADLINES, id)
    drop(tenant_deadlines_key(list, tenant), id)
  end
  if record.latest_start or not record.since then
    redis.call('ZREM', LATEST_STARTS, id)
    drop(tenant_starts_key(list, tenant), id)
  end
  if was_there == 1 and tonumber(redis.call('ZINCRBY', WAITING, -1, tenant)) <= 0 then
    redis.call('ZREM', WAITING, tenant)
  end
  if redis.call('EXISTS', tenant_ids_key(list, tenant)) == 0 then
    redis.call('ZREM', tenants_key(list), tenant)
    -- a worker of an earlier version does not remove the deadlines and latest starts of the messages that it takes
    for _, key in ipairs({tenant_deadlines_key(list, tenant), tenant_starts_key(list, tenant)}) do
      if not problem_of(key, 'zset') then redis.call('DEL', key) end
    end
  end
end

-- Creates the wake-up token of the queue if sorted messages wait, and deletes it if none wait. An idle worker waits for
-- the token and takes it. The script that leaves messages behind creates it again, so they wake one worker after the
-- other.
local function update_wake_up()
  if redis.call('EXISTS', WAITING) == 0 then
    redis.call('DEL', WAKE_UP)
  elseif redis.call('EXISTS', WAKE_UP) == 0 then
    redis.call('LPUSH', WAKE_UP, '1')
  end
end

-- Returns the messages that woke a worker, and that are not sorted yet, to their list. Each message that is still in the
-- list after the script wakes another idle worker.
local function return_arrived(list)
  while redis.call('LMOVE', arrived_key(list), list, 'LEFT', 'RIGHT') do end
end

-- Lets the messages of these lists that no worker has taken wake idle workers.
local function wake(lists)
  for _, list in ipairs(lists) do
    if not (problem_of(list, 'list') or problem_of(arrived_key(list), 'list')) then return_arrived(list) end
  end
  update_wake_up()
end

local renewed = {}

-- Lets a key of the shares live on.
local function renew(key)
  if not renewed[key] then redis.call('EXPIRE', key, SHARE_SECONDS) end
  renewed[key] = true
end

-- Sets the score of a tenant in a set of the shares.
local function score(key, tenant, number)
  if redis.call('ZADD', key, number, tenant) == 1 then
    redis.call('ZREMRANGEBYRANK', key, 0, -MOST_TENANTS - 1) -- the dropped tenants would start there anyway
  end
  renew(key)
end

-- Returns the expected cost of a request of the tenant, in tokens.
local function estimate(tenant)
  return number_in(redis.call('ZSCORE', COSTS, tenant)) or number_in(redis.call('GET', MEAN_COST), FIRST_ESTIMATE)
end

local function add_service(record, tokens)
  local service = tokens / record.weight
  redis.call('ZINCRBY', served_key(record.level), service, record.tenant)
  redis.call('ZADD', tenants_key(record.level), 'XX', 'INCR', service, record.tenant)
end

-- Charges the expected cost of a message that is leased now to its tenant, whose service is `start` so far.
local function charge(id, record, start, weight)
  local list, tenant = record.level, record.tenant
  record.charge, record.weight = estimate(tenant), weight
  keep(id, record)
  local service = start + record.charge / weight
  score(served_key(list), tenant, service)
  redis.call('ZADD', tenants_key(list), 'XX', service, tenant)
  local virtual_time = number_in(redis.call('HGET', VIRTUAL_TIME, list), 0)
  redis.call('HSET', VIRTUAL_TIME, list, string.format('%.17g', math.max(virtual_time, start)))
  renew(VIRTUAL_TIME)
end

-- Replaces the charged expected cost of a message by the actual one, in tokens.
local function charge_actual(record, tokens)
  if not record.charge then return end
  add_service(record, tokens - record.charge)
  if tokens <= 0 then return end -- it never ran, so it does not count in the averages
  local function mean(before) return before and before + NEWEST_COST * (tokens - before) or tokens end
  local cost = mean(number_in(redis.call('ZSCORE', COSTS, record.tenant)))
  score(COSTS, record.tenant, cost)
  local of_all = mean(number_in(redis.call('GET', MEAN_COST)))
  redis.call('SET', MEAN_COST, string.format('%.17g', of_all), 'EX', SHARE_SECONDS)
end

-- Removes the charge of a message that is no longer leased and has not ended.
local function refund(id, record)
  if not record.charge then return end
  add_service(record, -record.charge)
  record.charge, record.weight = nil, nil
  keep(id, record)
end

-- Updates the record of a message that was leased and waits again. The time of the lease does not count in its age. A
-- preempted message takes its old place in the list where it arrived, and its age starts at 0 there.
local function wait_again(record, is_preempted)
  local at = microseconds_now()
  if is_preempted then
    record.level, record.since, record.first = record.list, record.first or record.since, nil
    record.held = math.max(0, at - record.since)
    record.preempted = (record.preempted or 0) + 1
  elseif record.taken then
    record.held = (record.held or 0) + math.max(0, at - record.taken)
  end
  record.taken = nil
end

-- Returns whether a stored message is neither leased nor waiting, so that no script would ever find it. `list` is the
-- list where a message without a record would wait; nil if that is unknown.
local function is_orphan(id, list)
  local record = record_of(id)
  local list = record and record.level or list
  if not list or redis.call('ZSCORE', LEASES, id) or problem_of(sorted_ids_key(list), 'zset') then return false end
  return not redis.call('ZSCORE', sorted_ids_key(list), id)
end

-- Returns a message to its place in the queue, before the later messages of its tenant. Its tenant is charged again
-- when it is leased again. The first write is a removal of nothing, because a server out of memory refuses a script
-- whose first write may need memory. `list`: the list that the lease names, or nil. `choices`: the number of choices to
-- record, or nil to keep the recorded one. Result: nil, or the problem that blocks its place. In that case nothing was
-- written.
local function requeue(id, list, is_preempted, choices)
  local record = record_of(id)
  list = record and record.list or list
  local waits = record and not record.refused
  local problem = waits and problem_of_place(record) or not waits and list and problem_of(list, 'list')
    or waits and is_preempted and problem_of_place({level = list, tenant = record.tenant})
  if problem then return problem end
  redis.call('ZREM', LEASES, '')
  undelay(id, record)
  local body = redis.call('HGET', LEASE_BODIES, id)
  if waits and body then
    refund(id, record)
    wait_again(record, is_preempted)
    record.choices = choices or record.choices
    keep(id, record)
    enter(id, record)
    update_wake_up()
  elseif body and not list then -- keys were deleted by hand
    dead_letter(body, '', number_in(redis.call('HGET', LEASE_DELIVERIES, id), 0), DEAD_LIST_UNKNOWN)
    redis.call('HDEL', LEASE_DELIVERIES, id)
    forget(id)
  else
    if body then redis.call('RPUSH', list, body) end
    forget(id)
  end
  revoke(id)
end

-- Returns a sorted message to its list and deletes its record, if any. The next fetch sorts it again.
local function unsort(id, list, tenant)
  local body = redis.call('HGET', LEASE_BODIES, id)
  leave(id, {level = list, tenant = tenant or body and tenant_of(body) or ''})
  if body then redis.call('RPUSH', list, body) end
  forget(id)
end
