-- Sorts what has arrived, then takes messages in fair order and leases them, all in one step, so that none is ever in
-- nobody's hands.
-- KEYS: LIST[]
-- ARGV: count, owner, lease_seconds, delivery_limit, packed_policy, mode, num_lists
-- LIST: in the order in which they are served. packed_policy: msgpack map of weights, ageing_seconds, quota, prefixes that
-- this worker holds, or nothing. mode: 'sort' to sort first, 'sort only' to lease nothing at all. num_lists: from how many of
-- the lists messages are taken, or '' for all of them; what has aged into one of these is then left.
-- Returns {{id, list, body, deliveries, the quota if it was over that or 0, the request id that is bound to it or '',
-- microseconds that it has waited or '', the list of the level where it counted, how often it was preempted}, ...} of the
-- leased, {{list, body, deliveries, reason, the request id that was bound to it or ''}, ...} of those that are dead now, how
-- many are unsorted, and what keeps messages from being sorted or taken, or ''. Where it was to sort and there are any
-- unsorted, none was taken but those over their tenant's quota, which come beside those asked for.
local wanted, seconds, limit = tonumber(count), tonumber(lease_seconds), tonumber(delivery_limit)
local policy, is_to_sort = cmsgpack.unpack(packed_policy), mode ~= ''
local lists_taken_from = tonumber(num_lists)
-- At messages that may have come by other lists: so many, and so many of one tenant, that others are seen, too.
local looks_left, LOOKS_AT_TENANT = 400, 32
-- However much has arrived, the script stays short.
local sorts_left, bytes_left = 100, 1024 * 1024
local ages_left = 100
local STRAYS_LOOKED_AT = 10
local reply_bytes_left = 1024 * 1024
-- The largest request that a worker accepts takes less than 8 MiB; what is larger never reaches one.
local LONGEST_MESSAGE, BYTES_KEPT, ESCAPES_PASSED = 8 * 1024 * 1024, 4096, 100000
-- Prefix affinity looks at so many messages of the tenant that is due, and goes before the same one so often at most.
local LOOKED_AT, MOST_SKIPS = 16, 8

local time = redis.call('TIME')
local microseconds = time[1] * 1000000 + time[2]
local leased, dead, num_refused = {}, {}, 0
local problem = ''

-- Whether it is one, and the script is to leave alone what it keeps.
local function is_kept_by(found)
  problem = found or problem
  return found ~= nil
end

-- Since it was first sorted, or since its time where it had one of its own: by this server's clock alone.
local function waited(record)
  local since = record.sorted and math.max(record.sorted, record.due or 0)
  return since and string.format('%.0f', math.max(0, microseconds - since)) or ''
end

local function lease(id, record, body, deliveries, quota)
  leased[#leased + 1] = {
    id, record.list, body, deliveries, quota, record.request or '', waited(record), record.level, record.preempted or 0,
  }
end

local function give_up(body, list, deliveries, reason, request)
  bury(body, list, deliveries, reason)
  dead[#dead + 1] = {list, body, deliveries, reason, request or ''}
end

-- What is kept of a message that is too large: its headers, which most producers write behind the body and some before
-- it, so that whoever waits for the request can be told; where these cannot be read, its beginning. And its request id.
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
  local request = headers and request_of(headers)
  if not request then return string.sub(body, 1, BYTES_KEPT) end
  return #tail < BYTES_KEPT and '{' .. tail or cjson.encode({headers = {id = request}}), request
end

local function bury_too_large(body, list)
  local reason = string.format('%s: %d bytes of at most %d, not kept whole', DEAD_TOO_LARGE, #body, LONGEST_MESSAGE)
  local kept, request = shortened(body)
  give_up(kept, list, 0, reason, request and not holder_of(request) and request)
end

-- The body inside the message, as it is encoded there; nil where it is no text, or has very many escaped characters.
-- Lua's plain searches take a fraction of the time that its patterns take.
local function content_of(message)
  local _, named = string.find(message, '"body":', 1, true)
  local _, before = string.find(message, '^%s*"', (named or #message) + 1)
  local at, escapes_left = before and before + 1, ESCAPES_PASSED
  while at and escapes_left > 0 do
    local quote = string.find(message, '"', at, true)
    if not quote then return nil end
    local escapes = 0
    while escapes <= escapes_left and string.byte(message, quote - 1 - escapes) == 92 do escapes = escapes + 1 end
    if escapes % 2 == 0 and escapes <= escapes_left then return string.sub(message, before + 1, quote - 1) end
    at, escapes_left = quote + 1, escapes_left - escapes
  end
end

local function is_base64(text)
  return type(text) == 'string' and #string.gsub(text, '[^%w+/=]', '') % 4 == 0
end

-- Whether a worker can read the message, as far as its envelope shows.
local function is_readable(message)
  if #message > LONGEST_HEADERS then return true end
  local decoded, envelope = pcall(cjson.decode, message)
  local properties = decoded and type(envelope) == 'table' and envelope.properties
  if type(properties) ~= 'table' or type(properties.delivery_info) ~= 'table' then return false end
  local encoding = properties.body_encoding or cjson.null
  return encoding == cjson.null or encoding == 'utf-8' or encoding == 'base64' and is_base64(envelope.body)
end

-- A second message of a request id changes nothing. One that says the same is dropped: its client could not know
-- whether the first had arrived. One that says something else becomes a dead letter. False where the first cannot be
-- read, so that the id is free.
local function set_aside(body, list, tenant, first)
  local known = redis.call('HGET', LEASE_BODIES, first)
  bytes_left = bytes_left - #known
  if not is_readable(known) then
    local record = record_of(first)
    if record then
      record.request = nil
      keep(first, record)
    end
    return false
  end
  local content = content_of(body)
  local is_same = content and content == content_of(known) and tenant == tenant_of(known)
  if not is_same then give_up(body, list, 0, DEAD_DUPLICATE_ID) end
  return true
end

-- Counts one more delivery. False if there were too many, and the message is buried.
local function deliver(id, record, body)
  local deliveries = count_delivery(id)
  if deliveries <= limit then
    grant(id, owner, record.list, seconds)
    return deliveries
  end
  forget(id)
  redis.call('HDEL', LEASE_DELIVERIES, id)
  give_up(body, record.list, limit, DEAD_DELIVERY_LIMIT, record.request or select(3, tenant_of(body)))
  return false
end

-- Its tenant has too many messages in the queue: a worker is to say so, and holds it until then.
local function refuse(id, record, body)
  record.refused = true
  keep(id, record)
  local deliveries = deliver(id, record, body)
  if not deliveries then return end
  num_refused = num_refused + 1
  lease(id, record, body, deliveries, policy.quota)
end

local function sort(list)
  local waiting, delayed = waiting_key(queue_of(list)), delayed_tenants_key(queue_of(list))
  local since
  while sorts_left > 0 and bytes_left > 0 do
    local body = redis.call('RPOP', list)
    if not body then return end
    sorts_left, bytes_left = sorts_left - 1, bytes_left - #body
    local id = #body <= LONGEST_MESSAGE and lease_id_of(body)
    local known = id and redis.call('HEXISTS', LEASE_BODIES, id) == 1
    local is_like_it = known and #body > HASHED_WHOLE and redis.call('HGET', LEASE_BODIES, id) ~= body
    local tenant, prefix, request
    if id and (is_like_it or not known) then tenant, prefix, request = tenant_of(body) end
    local first = is_like_it and id or request and holder_of(request)
    if not id then
      bury_too_large(body, list)
    elseif known and not is_like_it then
      bury(body, list, 0, DEAD_DUPLICATE) -- a copy of a message that waits or is being worked on
    elseif not first or not set_aside(body, list, tenant, first) then
      -- a clock that was set back must not turn the order round
      since = since and since + 1
        or math.max(microseconds, number_in(redis.call('ZREVRANGE', sorted_ids_key(list), 0, 0, 'WITHSCORES')[2], 0) + 1)
      local queued = tonumber(redis.call('ZSCORE', waiting, tenant))
      -- by its own name, also where it has to share a place with others
      local is_over = policy.quota > 0
        and (queued or 0) + (redis.call('ZSCORE', delayed, tenant) or 0) >= policy.quota
      if not queued and redis.call('ZCARD', waiting) >= MOST_TENANTS then tenant = '' end
      if is_kept_by(problem_of(tenant_ids_key(list, tenant), 'zset')) then tenant = '' end
      if is_kept_by(problem_of(tenant_ids_key(list, tenant), 'zset')) then
        redis.call('RPUSH', list, body)
        return
      end
      local record = {
        list = list, level = list, tenant = tenant, since = since, prefix = prefix, request = request, sorted = microseconds,
      }
      if is_over and mode == 'sort only' then -- nobody can be told of it now
        redis.call('RPUSH', list, body)
        return
      end
      redis.call('HSET', LEASE_BODIES, id, body)
      if request then redis.call('HSET', LEASE_REQUESTS, request, id) end
      if is_over then
        refuse(id, record, body)
      else
        keep(id, record)
        enter(id, record)
      end
    end
  end
end

local function is_waiting(id, list)
  local record = record_of(id)
  local ids = sorted_ids_key(record and record.level or list)
  return problem_of(ids, 'zset') == nil and redis.call('ZSCORE', ids, id) ~= false
end

-- What is kept of leases by list may hold one that is no more: somebody has deleted keys by hand, or a worker of an
-- earlier version, which does not keep that, has ended it. Where its message is left, it is to be put back.
local function forget_strays(list)
  for _, leases in ipairs({held_key(list), delayed_key(list)}) do
    local expired = kind_of(leases) ~= 'none'
      and redis.call('ZRANGEBYSCORE', leases, '-inf', microseconds / 1000000, 'LIMIT', 0, STRAYS_LOOKED_AT)
    for _, id in ipairs(expired or {}) do
      local meta = redis.call('HGET', LEASE_META, id)
      local is_delayed = meta == 'delayed|' .. list
      if not meta and redis.call('HEXISTS', LEASE_BODIES, id) == 1 and not is_waiting(id, list) then
        if not is_kept_by(put_back(id, list)) then redis.call('ZREM', leases, id) end
      elseif not meta or list_of(meta) ~= list or is_delayed ~= (leases == delayed_key(list)) then
        redis.call('ZREM', leases, id)
      elseif not redis.call('ZSCORE', LEASES, id) then
        redis.call('ZADD', LEASES, microseconds / 1000000, id)
      end
    end
  end
end

local is_taken_from = {} -- by list

-- What is known of a message that waits at the level.
local function record_at(level, id)
  local record = record_of(id, queue_of(level))
  if record then record.level = level end
  return record
end

-- A message that has waited so long counts at the next better level. Returns whether any does now.
local function age(level, better)
  if is_kept_by(problem_of_level(better)) then return false end
  local step = policy.ageing_seconds * 1000000
  local aged = redis.call('ZRANGEBYSCORE', sorted_ids_key(level), '-inf', microseconds - step, 'LIMIT', 0, ages_left)
  ages_left = ages_left - #aged
  for _, id in ipairs(aged) do
    local record = record_at(level, id)
    if not record then -- somebody has deleted keys by hand
      unsort(id, level)
    elseif not is_kept_by(problem_of(tenant_ids_key(better, record.tenant), 'zset')) then
      leave(id, record)
      record.level, record.since, record.first = better, record.since + step, record.first or record.since
      keep(id, record)
      enter(id, record)
    end
  end
  return #aged > 0
end

local held_prefixes = not lists_taken_from and policy.prefixes and {}
for _, prefix in ipairs(held_prefixes and policy.prefixes or {}) do held_prefixes[prefix] = true end

local function is_held(record)
  return record ~= nil and record.prefix ~= nil and held_prefixes[record.prefix] ~= nil
end

-- The tenant's next message: its id, its record, and the id of the one that it goes before, if any.
local function choose(level, tenant)
  local ids = redis.call('ZRANGE', tenant_ids_key(level, tenant), 0, held_prefixes and LOOKED_AT - 1 or 0)
  local id = ids[1]
  local record = id and record_at(level, id)
  if not record or not held_prefixes or is_held(record) or (record.skipped or 0) >= MOST_SKIPS then return id, record end
  for i = 2, #ids do
    local other = record_at(level, ids[i])
    if is_held(other) then return ids[i], other, id end
  end
  return id, record
end

-- The tenant's next message that came by one of the lists to take from: its id and its record, or nothing.
local function choose_of_lists(level, tenant)
  if looks_left <= 0 then return end
  local last = math.min(looks_left, LOOKS_AT_TENANT) - 1
  for _, id in ipairs(redis.call('ZRANGE', tenant_ids_key(level, tenant), 0, last)) do
    looks_left = looks_left - 1
    local record = record_at(level, id)
    if not record or is_taken_from[record.list] then return id, record end
  end
end

local function skip(level, id)
  local record = record_at(level, id)
  record.skipped = (record.skipped or 0) + 1
  keep(id, record)
end

local function take(id, record, start)
  local body = redis.call('HGET', LEASE_BODIES, id)
  leave(id, record)
  if not body then
    forget(id)
    return
  end
  local deliveries = deliver(id, record, body)
  if not deliveries then return end
  if held_prefixes and record.prefix then held_prefixes[record.prefix] = true end
  record.taken = microseconds
  charge(id, record, start, policy.weights[record.tenant] or 1)
  lease(id, record, body, deliveries, 0)
  reply_bytes_left = reply_bytes_left - #body
end

-- Messages that no tenant at their level has any more, as somebody has deleted keys by hand, are sorted anew.
local function recover(level)
  if redis.call('EXISTS', tenants_key(level)) == 1 then return end
  local ids = redis.call('ZRANGE', sorted_ids_key(level), 0, 99)
  for i = #ids, 1, -1 do unsort(ids[i], level) end
end

-- Whether the queue's sorted messages are those of its tenants' count.
local function recount(queue, levels)
  if kind_of(waiting_key(queue)) == 'none' then return end
  for _, level in ipairs(levels) do
    if redis.call('EXISTS', sorted_ids_key(level)) == 1 then return end
  end
  redis.call('DEL', waiting_key(queue))
end

-- Where nothing is, nothing need be done, nor any more keys looked at.
local lists, levels_of, in_use = {}, {}, {}
for i, list in ipairs(LIST) do
  local queue = queue_of(list)
  in_use[list] = kind_of(list) ~= 'none' or kind_of(sorted_ids_key(list)) ~= 'none' or kind_of(tenants_key(list)) ~= 'none'
  if not is_kept_by(problem_of(list, 'list') or problem_of(held_key(list), 'zset')
      or problem_of(delayed_key(list), 'zset') or in_use[list] and problem_of_level(list) or nil) then
    forget_strays(list)
    levels_of[queue] = levels_of[queue] or {}
    table.insert(levels_of[queue], list)
    lists[#lists + 1] = list
    is_taken_from[list] = i <= (lists_taken_from or #LIST)
  end
end

local unsorted = 0
if is_to_sort then
  for _, list in ipairs(lists) do
    if in_use[list] then
      if kind_of(list) ~= 'none' then sort(list) end
      recover(list)
      unsorted = unsorted + redis.call('LLEN', list)
    end
  end
  for _, levels in pairs(levels_of) do
    for i = #levels, 2, -1 do -- the worst first, so that what waits for long takes all its steps at once
      local is_to_age = policy.ageing_seconds > 0 and ages_left > 0 and in_use[levels[i]]
      if is_to_age and age(levels[i], levels[i - 1]) then in_use[levels[i - 1]] = true end
    end
  end
end

-- What is large is taken by a script of its own, so that none is long.
if unsorted == 0 and bytes_left <= 0 and wanted > 0 then
  unsorted = 1
elseif unsorted == 0 then
  local tries_left = wanted + 100
  for _, level in ipairs(lists) do
    local num_kept = 0 -- tenants whose messages cannot be reached; they stay where they are, before all others
    if not is_taken_from[level] then break end
    while in_use[level] and #leased - num_refused < wanted and tries_left > 0 and reply_bytes_left > 0 do
      local least = redis.call('ZRANGE', tenants_key(level), num_kept, num_kept, 'WITHSCORES')
      local tenant, start = least[1], number_in(least[2], 0)
      if not tenant then break end
      tries_left = tries_left - 1
      if is_kept_by(problem_of(tenant_ids_key(level, tenant), 'zset')) then
        num_kept = num_kept + 1
      else
        local id, record, skipped
        if lists_taken_from then
          id, record = choose_of_lists(level, tenant)
        else
          id, record, skipped = choose(level, tenant)
        end
        if not id and lists_taken_from then
          num_kept = num_kept + 1
        elseif record then
          record.tenant = tenant
          take(id, record, start)
          if skipped then skip(level, skipped) end
        elseif id then -- somebody has deleted keys by hand
          unsort(id, level, tenant)
        else
          redis.call('ZREM', tenants_key(level), tenant)
          redis.call('ZREM', waiting_key(queue_of(level)), tenant)
        end
      end
    end
  end
end
for queue, levels in pairs(levels_of) do
  if problem == '' and #leased - num_refused < wanted then recount(queue, levels) end
  ring(queue)
end
return {leased, dead, unsorted, problem}
