-- Messages that wait, sorted by tenant, and the service that each tenant has had. Behind lease_prelude.
--
-- A message counts at a level: the list it came by, or a better one of its queue once it has aged. Each level is served
-- by start-time fair queueing (Goyal, Vin, Cheng 1996): a tenant's service is its tokens by its weight, the one with the
-- least is next, and who comes back from idleness begins at the level's clock, so that nobody can save up.
-- A record is what is known of a message, waiting or leased: list, level, tenant, request (the id that is bound to it, or
-- nil), since (microseconds: from when on it counts at its level, which is its place), prefix (a hash of its prompt's
-- beginning, where it says) and skipped (how often affinity went before it), delayed (true before its time), sorted
-- (microseconds: when it was first sorted), due (microseconds: its time, where it had one of its own), preempted (how often
-- it made room for a better one), first (its place at its own list, once it has aged), held (microseconds in which it did not
-- age), taken (microseconds: when it was taken, while somebody holds it), and once it was taken charge and weight.

local MOST_TENANTS = 1000
local FIRST_ESTIMATE = 256 -- tokens of a request, where no request of the queue has ended yet
local NEWEST_COST = 0.2 -- its part in the mean

-- What keeps all messages from a level, and from being taken there, or nil.
local function problem_of_level(level)
  local queue = queue_of(level)
  return problem_of(sorted_ids_key(level), 'zset') or problem_of(tenants_key(level), 'zset')
    or problem_of(served_key(level), 'zset') or problem_of(waiting_key(queue), 'zset')
    or problem_of(delayed_tenants_key(queue), 'zset') or problem_of(costs_key(queue), 'zset')
    or problem_of(SHARE_CLOCK, 'hash') or problem_of(SHARE_MEAN, 'hash')
end

-- What keeps a message from its place, or nil.
local function problem_of_place(record)
  return problem_of_level(record.level) or problem_of(tenant_ids_key(record.level, record.tenant), 'zset')
end

local function keep(id, record)
  redis.call('HSET', LEASE_RECORDS, id, cmsgpack.pack(record))
end

-- The message has a time of its own, until which it counts among its tenant's as if it waited.
local function delay(id, record)
  record.delayed = true
  keep(id, record)
  redis.call('ZINCRBY', delayed_tenants_key(queue_of(record.list)), 1, record.tenant)
end

-- Its time has come, or it is no more.
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

-- The least service of those that wait now. The clock is the service at which the last message was taken; a tenant may
-- be behind it whose messages turned out to be cheap.
local function floor_at(level)
  local clock = number_in(redis.call('HGET', SHARE_CLOCK, level), 0)
  local least = redis.call('ZRANGE', tenants_key(level), 0, 0, 'WITHSCORES')[2]
  return math.min(clock, number_in(least, clock))
end

local function enter(id, record)
  local level, tenant = record.level, record.tenant
  redis.call('ZADD', tenant_ids_key(level, tenant), record.since, id)
  redis.call('ZADD', sorted_ids_key(level), record.since + (record.held or 0), id) -- what it ages from
  redis.call('ZINCRBY', waiting_key(queue_of(level)), 1, tenant)
  if not redis.call('ZSCORE', tenants_key(level), tenant) then
    local served = number_in(redis.call('ZSCORE', served_key(level), tenant), 0)
    redis.call('ZADD', tenants_key(level), math.max(served, floor_at(level)), tenant)
  end
end

local function leave(id, record)
  undelay(id, record) -- a worker of an earlier version, which keeps no such count, has put it back
  local level, tenant = record.level, record.tenant
  local was_there = drop(tenant_ids_key(level, tenant), id)
  redis.call('ZREM', sorted_ids_key(level), id)
  local waiting = waiting_key(queue_of(level))
  if was_there == 1 and tonumber(redis.call('ZINCRBY', waiting, -1, tenant)) <= 0 then
    redis.call('ZREM', waiting, tenant)
  end
  if redis.call('EXISTS', tenant_ids_key(level, tenant)) == 0 then redis.call('ZREM', tenants_key(level), tenant) end
end

-- A worker without a message waits for this list: it holds a token as long as sorted messages wait.
local function ring(queue)
  local bell = bell_key(queue)
  if redis.call('EXISTS', waiting_key(queue)) == 0 then
    redis.call('DEL', bell)
  elseif redis.call('EXISTS', bell) == 0 then
    redis.call('LPUSH', bell, '1')
  end
end

local function trim(key)
  redis.call('ZREMRANGEBYRANK', key, 0, -MOST_TENANTS - 1) -- the least served begin at the floor anyway
  redis.call('EXPIRE', key, SHARE_SECONDS)
end

-- What a request of the tenant will probably cost, in tokens.
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

-- The message is taken: its tenant pays what it will probably cost, beginning at `start`.
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

-- The message has cost so many tokens.
local function settle(record, tokens)
  if not record.charge then return end
  add_service(record, tokens - record.charge)
  if tokens <= 0 then return end -- it never ran, which says nothing of its tenant's requests
  local queue = queue_of(record.level)
  local function mean(before) return before and before + NEWEST_COST * (tokens - before) or tokens end
  local cost = mean(number_in(redis.call('ZSCORE', costs_key(queue), record.tenant)))
  redis.call('ZADD', costs_key(queue), cost, record.tenant)
  trim(costs_key(queue))
  local of_all = mean(number_in(redis.call('HGET', SHARE_MEAN, queue)))
  redis.call('HSET', SHARE_MEAN, queue, string.format('%.17g', of_all))
  redis.call('EXPIRE', SHARE_MEAN, SHARE_SECONDS)
end

-- The message is not run now, and costs nothing.
local function refund(id, record)
  if not record.charge then return end
  add_service(record, -record.charge)
  record.charge, record.weight = nil, nil
  keep(id, record)
end

-- It ages no further in workers' hands; and where it was preempted, it ages anew, from its place at its own list on.
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

-- Back to its place, which is before all that its tenant sent later, and to be paid for when it is taken again.
-- The revocation comes first: a server out of memory refuses a script whose first write may need more.
-- Returns what keeps it from there, where nothing was written, or nil. `list` is nil where the lease does not say it.
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
    ring(queue_of(record.level))
  elseif body and not list then -- somebody has deleted keys by hand
    bury(body, '', number_in(redis.call('HGET', LEASE_DELIVERIES, id), 0), DEAD_LIST_UNKNOWN)
    redis.call('HDEL', LEASE_DELIVERIES, id)
    forget(id)
  else
    forget(id)
    if body then redis.call('RPUSH', list, body) end
  end
end

-- The message of which no record is left is sorted anew, from the list of the level where it is.
local function unsort(id, level, tenant)
  local body = redis.call('HGET', LEASE_BODIES, id)
  leave(id, {level = level, tenant = tenant or body and tenant_of(body) or ''})
  forget(id)
  if body then redis.call('RPUSH', level, body) end
end
