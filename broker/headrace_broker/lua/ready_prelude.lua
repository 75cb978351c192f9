-- Waiting messages, sorted by tenant, and the service that each tenant has received. Requires lease_prelude.
--
-- A message waits at a level: the list in which it arrived, or a better one of its queue once it has aged. Each level is
-- served by start-time fair queueing (Goyal, Vin, Cheng 1996): a tenant's service is its tokens divided by its weight. The
-- tenant with the least service is next. A tenant that returns starts at the level's virtual time, so it gets no credit for
-- its idle time. A record describes a message, waiting or leased. Times are in microseconds:
--   list, level, tenant; request: the id bound to it, or nil; prefix: a hash of its prompt's beginning, or nil
--   since: its place at its level, the time from which it counts there; first: its place at its own list, once it has aged
--   sorted: when it was first sorted; due: when it became due, if it was delayed; delayed: true until then
--   taken: when it was taken, while it is leased; held: for how long in all it did not age; charge, weight: once taken
--   skipped: how often affinity preferred a later message; preempted: how often it made room for a better one

local MOST_TENANTS = 1000
local FIRST_ESTIMATE = 256 -- tokens of a request before any request of the queue has ended
local NEWEST_COST = 0.2 -- weight of the newest cost in the moving average

-- Returns the problem that blocks all messages of a level, or nil.
local function problem_of_level(level)
  local queue = queue_of(level)
  return problem_of(sorted_ids_key(level), 'zset') or problem_of(tenants_key(level), 'zset')
    or problem_of(served_key(level), 'zset') or problem_of(waiting_key(queue), 'zset')
    or problem_of(delayed_tenants_key(queue), 'zset') or problem_of(costs_key(queue), 'zset')
    or problem_of(SHARE_CLOCK, 'hash') or problem_of(SHARE_MEAN, 'hash')
end

-- Returns the problem that blocks a message's place, or nil.
local function problem_of_place(record)
  return problem_of_level(record.level) or problem_of(tenant_ids_key(record.level, record.tenant), 'zset')
end

local function keep(id, record)
  redis.call('HSET', LEASE_RECORDS, id, cmsgpack.pack(record))
end

-- Marks the message as delayed. Until it is due, the tenant's quota counts it as waiting.
local function delay(id, record)
  record.delayed = true
  keep(id, record)
  redis.call('ZINCRBY', delayed_tenants_key(queue_of(record.list)), 1, record.tenant)
end

-- Clears the mark: the message is due, or it was taken or deleted.
local function undelay(id, record)
  if not record or not record.delayed then return end
  record.delayed = nil
  keep(id, record)
  local delayed = delayed_tenants_key(queue_of(record.list))
  if problem_of(delayed, 'zset') then return end
  if tonumber(redis.call('ZINCRBY', delayed, -1, record.tenant)) <= 0 then
    redis.call('ZREM', delayed, record.tenant)
  end
end

-- Returns the service at which a new tenant starts: the virtual time (at which the last message was taken), or the least
-- service of a waiting tenant. That may be less, if its messages cost less than estimated.
local function floor_at(level)
  local clock = number_in(redis.call('HGET', SHARE_CLOCK, level), 0)
  local least = redis.call('ZRANGE', tenants_key(level), 0, 0, 'WITHSCORES')[2]
  return math.min(clock, number_in(least, clock))
end

local function enter(id, record)
  local level, tenant = record.level, record.tenant
  redis.call('ZADD', tenant_ids_key(level, tenant), record.since, id)
  redis.call('ZADD', sorted_ids_key(level), record.since + (record.held or 0), id) -- it ages from this time on
  redis.call('ZINCRBY', waiting_key(queue_of(level)), 1, tenant)
  if not redis.call('ZSCORE', tenants_key(level), tenant) then
    local served = number_in(redis.call('ZSCORE', served_key(level), tenant), 0)
    redis.call('ZADD', tenants_key(level), math.max(served, floor_at(level)), tenant)
  end
end

local function leave(id, record)
  undelay(id, record) -- if a worker of an earlier version, which does not count delayed messages, put it back
  local level, tenant = record.level, record.tenant
  local was_there = drop(tenant_ids_key(level, tenant), id)
  redis.call('ZREM', sorted_ids_key(level), id)
  local waiting = waiting_key(queue_of(level))
  if was_there == 1 and tonumber(redis.call('ZINCRBY', waiting, -1, tenant)) <= 0 then
    redis.call('ZREM', waiting, tenant)
  end
  if redis.call('EXISTS', tenant_ids_key(level, tenant)) == 0 then redis.call('ZREM', tenants_key(level), tenant) end
end

-- Sets or deletes the wake-up token of a queue: idle workers wait for it, and it exists while sorted messages wait.
local function update_wake_up(queue)
  local token = wake_up_key(queue)
  if redis.call('EXISTS', waiting_key(queue)) == 0 then
    redis.call('DEL', token)
  elseif redis.call('EXISTS', token) == 0 then
    redis.call('LPUSH', token, '1')
  end
end

local function trim(key)
  redis.call('ZREMRANGEBYRANK', key, 0, -MOST_TENANTS - 1) -- the tenants with the least service start at the floor anyway
  redis.call('EXPIRE', key, SHARE_SECONDS)
end

-- Returns the expected cost of a request of the tenant, in tokens.
local function estimate(queue, tenant)
  return number_in(redis.call('ZSCORE', costs_key(queue), tenant),
    number_in(redis.call('HGET', SHARE_MEAN, queue), FIRST_ESTIMATE))
end

local function add_service(record, tokens)
  local service = tokens / record.weight
  redis.call('ZINCRBY', served_key(record.level), service, record.tenant)
  if redis.call('ZSCORE', tenants_key(record.level), record.tenant) then
    redis.call('ZINCRBY', tenants_key(record.level), service, record.tenant)
  end
end

-- Charges the expected cost of a taken message to its tenant, whose service is `start` so far.
local function charge(id, record, start, weight)
  local level, tenant = record.level, record.tenant
  record.charge, record.weight = estimate(queue_of(level), tenant), weight
  keep(id, record)
  local service = start + record.charge / weight
  redis.call('ZADD', served_key(level), service, tenant)
  redis.call('ZADD', tenants_key(level), 'XX', service, tenant)
  trim(served_key(level))
  local clock = number_in(redis.call('HGET', SHARE_CLOCK, level), 0)
  redis.call('HSET', SHARE_CLOCK, level, string.format('%.17g', math.max(clock, start)))
  redis.call('EXPIRE', SHARE_CLOCK, SHARE_SECONDS)
end

-- Replaces the expected cost of a message by the actual one.
local function settle(record, tokens)
  if not record.charge then return end
  add_service(record, tokens - record.charge)
  if tokens <= 0 then return end -- it never ran, so it does not count in the averages
  local queue = queue_of(record.level)
  local function mean(before) return before and before + NEWEST_COST * (tokens - before) or tokens end
  local cost = mean(number_in(redis.call('ZSCORE', costs_key(queue), record.tenant)))
  redis.call('ZADD', costs_key(queue), cost, record.tenant)
  trim(costs_key(queue))
  local of_all = mean(number_in(redis.call('HGET', SHARE_MEAN, queue)))
  redis.call('HSET', SHARE_MEAN, queue, string.format('%.17g', of_all))
  redis.call('EXPIRE', SHARE_MEAN, SHARE_SECONDS)
end

-- Takes the charge back, as the message does not run now.
local function refund(id, record)
  if not record.charge then return end
  add_service(record, -record.charge)
  record.charge, record.weight = nil, nil
  keep(id, record)
end

-- Excludes the time of the lease from a message's age. A preempted message ages anew, from its place at its own list.
local function wait_again(record, is_preempted)
  local at = math.floor(now() * 1000000)
  if is_preempted then
    record.level, record.since, record.first = record.list, record.first or record.since, nil
    record.held = math.max(0, at - record.since)
    record.preempted = (record.preempted or 0) + 1
  elseif record.taken then
    record.held = (record.held or 0) + math.max(0, at - record.taken)
  end
  record.taken = nil
end

-- Puts a message back at its place, before the later messages of its tenant. It is charged when it is taken again.
-- The lease is removed first: a server out of memory refuses a script whose first write may need more.
-- Returns the problem that blocks its place, without a write, or nil. `list` is nil if the lease does not name it.
local function put_back(id, list, is_preempted)
  local record = record_of(id)
  list = record and record.list or list
  local waits = record and not record.refused
  local problem = waits and problem_of_place(record) or not waits and list and problem_of(list, 'list')
    or waits and is_preempted and problem_of_place({level = list, tenant = record.tenant})
  if problem then return problem end
  revoke(id)
  undelay(id, record)
  local body = redis.call('HGET', LEASE_BODIES, id)
  if waits and body then
    refund(id, record)
    wait_again(record, is_preempted)
    keep(id, record)
    enter(id, record)
    update_wake_up(queue_of(record.level))
  elseif body and not list then -- keys were deleted by hand
    dead_letter(body, '', number_in(redis.call('HGET', LEASE_DELIVERIES, id), 0), DEAD_LIST_UNKNOWN)
    redis.call('HDEL', LEASE_DELIVERIES, id)
    forget(id)
  else
    forget(id)
    if body then redis.call('RPUSH', list, body) end
  end
end

-- Moves a message without a record back to the list of its level, where it is sorted again.
local function unsort(id, level, tenant)
  local body = redis.call('HGET', LEASE_BODIES, id)
  leave(id, {level = level, tenant = tenant or body and tenant_of(body) or ''})
  forget(id)
  if body then redis.call('RPUSH', level, body) end
end
