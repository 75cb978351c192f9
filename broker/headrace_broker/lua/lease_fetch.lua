-- Sorts what has arrived, then takes messages in fair order and leases them, all in one step, so that none is ever in
-- nobody's hands. KEYS: the lease keys, then the lists in the order in which they are served.
-- ARGV: how many, owner, seconds of the lease, delivery limit, policy (msgpack map: weights, ageing_seconds, quota,
-- prefixes that this worker holds, or nothing), 1 to sort first.
-- Returns {{id, list, body, deliveries, the quota if it was over that or 0}, ...} of the leased, {{list, body,
-- deliveries, reason}, ...} of those that are dead now, and how many are unsorted: where it was to sort and there are
-- any, none was taken but those over their tenant's quota, which come beside those asked for.
local wanted, owner, seconds, limit = tonumber(ARGV[1]), ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local policy, is_to_sort = cmsgpack.unpack(ARGV[5]), ARGV[6] == '1'
local FIRST_LIST = 9
-- However much has arrived, the script stays short.
local sorts_left, bytes_left = 100, 1024 * 1024
local ages_left = 100
local STRAYS_LOOKED_AT = 10
local reply_bytes_left = 1024 * 1024
-- The largest request that a worker accepts takes less than 8 MiB; what is larger never reaches one.
local LONGEST_MESSAGE, BYTES_KEPT, LONGEST_ID = 8 * 1024 * 1024, 4096, 2048
-- Prefix affinity looks at so many messages of the tenant that is due, and goes before the same one so often at most.
local LOOKED_AT, MOST_SKIPS = 16, 8

local time = redis.call('TIME')
local microseconds = time[1] * 1000000 + time[2]
local leased, dead, num_refused = {}, {}, 0

local function give_up(body, list, deliveries, reason)
  bury(body, list, deliveries, reason)
  dead[#dead + 1] = {list, body, deliveries, reason}
end

-- What is kept of a message that is too large: its headers, which most producers write behind the body and some before
-- it, so that whoever waits for the request can be told; where these cannot be read, its beginning.
local function shortened(body)
  local tail = string.sub(body, -LONGEST_HEADERS)
  tail = string.sub(tail, string.find(tail, '"headers":', 1, true) or #tail + 1)
  local headers = headers_in(tail)
  if not headers then
    local head = string.sub(body, 1, LONGEST_HEADERS)
    local at = string.find(head, '"headers":', 1, true)
    tail = at and string.match(head, '^"headers":%s*%b{}', at) -- from there alone, which takes one pass
    tail = tail and tail .. '}'
    headers = tail and headers_in(tail)
  end
  local id = headers and headers.id
  if type(id) ~= 'string' or #id > LONGEST_ID then return string.sub(body, 1, BYTES_KEPT) end
  return #tail < BYTES_KEPT and '{' .. tail or cjson.encode({headers = {id = id}})
end

-- Counts one more delivery. False if there were too many, and the message is buried.
local function deliver(id, record, body)
  local deliveries = redis.call('HINCRBY', DELIVERIES, id, 1)
  if deliveries <= limit then
    grant(id, owner, record.list, seconds)
    return deliveries
  end
  forget(id)
  redis.call('HDEL', DELIVERIES, id)
  give_up(body, record.list, limit, 'delivery limit')
  return false
end

-- Its tenant has too many messages in the queue: a worker is to say so, and holds it until then.
local function refuse(id, record, body)
  record.refused = true
  keep(id, record)
  local deliveries = deliver(id, record, body)
  if not deliveries then return end
  num_refused = num_refused + 1
  leased[#leased + 1] = {id, record.list, body, deliveries, policy.quota}
end

local function sort(list)
  local waiting, delayed = waiting_in(queue_of(list)), delayed_in(queue_of(list))
  local since
  while sorts_left > 0 and bytes_left > 0 do
    local body = redis.call('RPOP', list)
    if not body then return end
    sorts_left, bytes_left = sorts_left - 1, bytes_left - #body
    local id = #body <= LONGEST_MESSAGE and redis.sha1hex(body)
    if not id then
      local reason = string.format('too large: %d bytes of at most %d, not kept whole', #body, LONGEST_MESSAGE)
      give_up(shortened(body), list, 0, reason)
    elseif redis.call('HEXISTS', BODIES, id) == 1 then
      bury(body, list, 0, 'duplicate') -- a copy of a message that waits or is being worked on
    else
      -- a clock that was set back must not turn the order round
      since = since and since + 1
        or math.max(microseconds, (redis.call('ZREVRANGE', ids_at(list), 0, 0, 'WITHSCORES')[2] or 0) + 1)
      local tenant, prefix = tenant_of(body)
      local queued = tonumber(redis.call('ZSCORE', waiting, tenant))
      -- by its own name, also where it has to share a place with others
      local is_over = policy.quota > 0
        and (queued or 0) + (redis.call('ZSCORE', delayed, tenant) or 0) >= policy.quota
      if not queued and redis.call('ZCARD', waiting) >= MOST_TENANTS then tenant = '' end
      local record = {list = list, level = list, tenant = tenant, since = since, prefix = prefix}
      redis.call('HSET', BODIES, id, body)
      if is_over then
        refuse(id, record, body)
      else
        keep(id, record)
        enter(id, record)
      end
    end
  end
end

-- What is kept of leases by list may hold one that is no more: somebody has deleted keys by hand, or a worker of an
-- earlier version, which does not keep that, has ended it.
local function forget_strays(list)
  for _, leases in ipairs({held_from(list), delayed_from(list)}) do
    for _, id in ipairs(redis.call('ZRANGEBYSCORE', leases, '-inf', microseconds / 1000000, 'LIMIT', 0, STRAYS_LOOKED_AT)) do
      local meta = redis.call('HGET', META, id)
      local is_delayed = meta == 'delayed|' .. list
      if not meta or list_of(meta) ~= list or is_delayed ~= (leases == delayed_from(list)) then
        redis.call('ZREM', leases, id)
      end
    end
  end
end

-- A message that has waited so long counts at the next better level.
local function age(level, better)
  local step = policy.ageing_seconds * 1000000
  local aged = redis.call('ZRANGEBYSCORE', ids_at(level), '-inf', microseconds - step, 'LIMIT', 0, ages_left)
  ages_left = ages_left - #aged
  for _, id in ipairs(aged) do
    local record = record_of(id)
    if record then
      leave(id, record)
      record.level, record.since = better, record.since + step
      keep(id, record)
      enter(id, record)
    else -- somebody has deleted keys by hand
      redis.call('ZREM', ids_at(level), id)
    end
  end
end

local held_prefixes = policy.prefixes and {}
for _, prefix in ipairs(policy.prefixes or {}) do held_prefixes[prefix] = true end

local function is_held(record)
  return record ~= nil and record.prefix ~= nil and held_prefixes[record.prefix] ~= nil
end

-- The tenant's next message: its id, its record, and the id of the one that it goes before, if any.
local function choose(level, tenant)
  local ids = redis.call('ZRANGE', messages_of(level, tenant), 0, held_prefixes and LOOKED_AT - 1 or 0)
  local id = ids[1]
  local record = id and record_of(id)
  if not record or not held_prefixes or is_held(record) or (record.skipped or 0) >= MOST_SKIPS then return id, record end
  for i = 2, #ids do
    local other = record_of(ids[i])
    if is_held(other) then return ids[i], other, id end
  end
  return id, record
end

local function skip(id)
  local record = record_of(id)
  record.skipped = (record.skipped or 0) + 1
  keep(id, record)
end

local function take(id, record, start)
  local body = redis.call('HGET', BODIES, id)
  leave(id, record)
  if not body then
    forget(id)
    return
  end
  local deliveries = deliver(id, record, body)
  if not deliveries then return end
  if held_prefixes and record.prefix then held_prefixes[record.prefix] = true end
  charge(id, record, start, policy.weights[record.tenant] or 1)
  leased[#leased + 1] = {id, record.list, body, deliveries, 0}
  reply_bytes_left = reply_bytes_left - #body
end

local unsorted = 0
if is_to_sort then
  local better = {}
  for i = FIRST_LIST, #KEYS do
    local list, queue = KEYS[i], queue_of(KEYS[i])
    forget_strays(list)
    sort(list)
    unsorted = unsorted + redis.call('LLEN', list)
    better[i], better[queue] = better[queue], list
  end
  for i = #KEYS, FIRST_LIST, -1 do -- the worst first, so that what waits for long takes all its steps at once
    if better[i] and policy.ageing_seconds > 0 and ages_left > 0 then age(KEYS[i], better[i]) end
  end
end

if unsorted == 0 then
  local tries_left = wanted + 100
  for i = FIRST_LIST, #KEYS do
    local level = KEYS[i]
    while #leased - num_refused < wanted and tries_left > 0 and reply_bytes_left > 0 do
      local least = redis.call('ZRANGE', tenants_at(level), 0, 0, 'WITHSCORES')
      local tenant, start = least[1], tonumber(least[2])
      if not tenant then break end
      tries_left = tries_left - 1
      local id, record, skipped = choose(level, tenant)
      if record then
        take(id, record, start)
        if skipped then skip(skipped) end
      elseif id then -- somebody has deleted keys by hand
        leave(id, {level = level, tenant = tenant})
        forget(id)
      else
        redis.call('ZREM', tenants_at(level), tenant)
        redis.call('ZREM', waiting_in(queue_of(level)), tenant)
      end
    end
  end
end
local rung = {}
for i = FIRST_LIST, #KEYS do
  local queue = queue_of(KEYS[i])
  if not rung[queue] then ring(queue) end
  rung[queue] = true
end
return {leased, dead, unsorted}
