-- Sorts what has arrived, then takes messages in fair order and leases them, all in one step, so that none is ever in
-- nobody's hands. KEYS: the lease keys, then the lists in the order in which they are served.
-- ARGV: how many, owner, seconds of the lease, delivery limit, policy (msgpack map: weights), 1 to take messages though
-- some are unsorted.
-- Returns {{id, list, body, deliveries}, ...} of the leased, {{list, body, deliveries}, ...} of the exhausted, and how
-- many are unsorted: where there are any, nothing was taken.
local wanted, owner, seconds, limit = tonumber(ARGV[1]), ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local policy, take_anyway = cmsgpack.unpack(ARGV[5]), ARGV[6] == '1'
local FIRST_LIST = 9
-- However much has arrived, the script stays short.
local sorts_left, bytes_left = 100, 4 * 1024 * 1024
local LONGEST_HEADERS, LONGEST_TENANT = 256 * 1024, 800

local time = redis.call('TIME')
local microseconds = time[1] * 1000000 + time[2]
local leased, exhausted = {}, {}

-- Who sent the message; '' where it does not say, or says nonsense. Only what begins with its headers is decoded: the
-- pattern cannot match inside a string of the message, where its quotes would be escaped.
local function tenant_of(body)
  local at = string.find(body, '"headers":', 1, true)
  if not at or #body - at > LONGEST_HEADERS then return '' end
  local readable, tail = pcall(cjson.decode, '{' .. string.sub(body, at))
  local headers = readable and tail.headers
  local tenant = type(headers) == 'table' and headers.tenant
  if type(tenant) ~= 'string' or #tenant > LONGEST_TENANT or string.find(tenant, '%c') then return '' end
  return tenant
end

local function sort(list)
  local waiting = waiting_in(queue_of(list))
  local since
  while sorts_left > 0 and bytes_left > 0 do
    local body = redis.call('RPOP', list)
    if not body then return end
    sorts_left, bytes_left = sorts_left - 1, bytes_left - #body
    local id = redis.sha1hex(body)
    if redis.call('HEXISTS', BODIES, id) == 1 then
      bury(body, list, 0, 'duplicate') -- a copy of a message that waits or is being worked on
    else
      -- a clock that was set back must not turn the order round
      since = since and since + 1
        or math.max(microseconds, (redis.call('ZREVRANGE', ids_at(list), 0, 0, 'WITHSCORES')[2] or 0) + 1)
      local tenant = tenant_of(body)
      local queued = redis.call('ZSCORE', waiting, tenant)
      if not queued and redis.call('ZCARD', waiting) >= MOST_TENANTS then tenant = '' end
      local record = {list = list, level = list, tenant = tenant, since = since}
      redis.call('HSET', BODIES, id, body)
      keep(id, record)
      enter(id, record)
    end
  end
end

local function take(id, record, start)
  local body = redis.call('HGET', BODIES, id)
  leave(id, record)
  if not body then
    forget(id)
    return
  end
  local deliveries = redis.call('HINCRBY', DELIVERIES, id, 1)
  if deliveries > limit then
    forget(id)
    redis.call('HDEL', DELIVERIES, id)
    bury(body, record.list, limit, 'delivery limit')
    exhausted[#exhausted + 1] = {record.list, body, limit}
    return
  end
  charge(id, record, start, policy.weights[record.tenant] or 1)
  grant(id, owner, record.list, seconds)
  leased[#leased + 1] = {id, record.list, body, deliveries}
end

local unsorted = 0
for i = FIRST_LIST, #KEYS do
  sort(KEYS[i])
  unsorted = unsorted + redis.call('LLEN', KEYS[i])
end

if unsorted == 0 or take_anyway then
  local tries_left = wanted + 100
  for i = FIRST_LIST, #KEYS do
    local level = KEYS[i]
    while #leased < wanted and tries_left > 0 do
      local least = redis.call('ZRANGE', tenants_at(level), 0, 0, 'WITHSCORES')
      local tenant, start = least[1], tonumber(least[2])
      if not tenant then break end
      tries_left = tries_left - 1
      local id = redis.call('ZRANGE', messages_of(level, tenant), 0, 0)[1]
      local record = id and record_of(id)
      if record then
        take(id, record, start)
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
return {leased, exhausted, unsorted}
