-- Sorts new messages, then leases messages in fair order. To sort a message is to move it from the list to which its
-- producer pushed it to the sorted sets of that list and of its tenant. A message that woke a worker returns to its list
-- first. One atomic script does all this, so that each message is always either in the queue or leased.
-- KEYS: LIST[]
-- ARGV: count, owner, lease_seconds, delivery_limit, packed_policy, mode, num_lists, num_split, num_served
-- LIST: the lists of the queue, in the order in which they are served. count: number of free slots. Each choice of a
-- message takes one.
-- packed_policy: msgpack map of weights (by tenant), ageing_seconds, quota, token_microseconds (the expected time of one
-- token of a request), order of a tenant's messages ('arrival' or 'deadline') and, with affinity, prefixes: those of this
-- worker's recent messages. With a grace it also has grace: how many microseconds a message waits for the holder of its
-- conversation. away: a map whose keys are the stream servers that this worker cannot write to; it leaves their messages
-- in the queue.
-- mode: 'sort' to sort first, 'sort only' (with count 0) to lease nothing, '' to lease without sorting.
-- num_lists: only messages that arrived in one of the first num_lists lists are leased, and none that aged into them;
-- '' for all lists.
-- num_split: a message with more choices than slots are left is leased only if it arrived in one of the first num_split
-- lists. It is then the last one. '' for all lists.
-- num_served: messages that wait in one of the first num_served lists are leased. '' for all lists.
-- Returns {leased, dead, number of unsorted messages, the problem that blocks sorting or leasing or '', microseconds
-- until the graces of all messages that this call has offered to their holders end or '', number of the first
-- list after num_served that is in use or 0, microseconds until a waiting message with a due time must start or ''}.
-- leased: for each message {lease id, list where it arrived, body, number of deliveries, its tenant's quota if the
-- message exceeds it or 0, request id bound to it or '', microseconds that it has waited or '', list where it waited
-- last, number of preemptions, number of choices, grant number, stream server of its request or '', stream server that
-- has lost its stream or ''}.
-- dead: for each new dead letter {list, body, number of deliveries, reason, request id that was bound to it or '',
-- stream server of that request or ''}.
-- With 'sort', messages over their tenant's quota are leased when they are sorted, in addition to `count`. Others are
-- leased only if no message is left unsorted.
local wanted, seconds, limit = tonumber(count), tonumber(lease_seconds), tonumber(delivery_limit)
local policy, is_to_sort = cmsgpack.unpack(packed_policy), mode ~= ''
local lists_taken_from, lists_split = tonumber(num_lists), tonumber(num_split)
local lists_served = tonumber(num_served) or #LIST
-- With num_lists, or while stream servers are away: the most messages that are read, in all and of each tenant, to find
-- those that may be taken.
local reads_left, READS_OF_TENANT = 400, 32
-- These limits bound the run time of the script, however many messages are new.
local sorts_left, bytes_left = 100, 1024 * 1024
local ages_left = 100
local reply_bytes_left = 1024 * 1024
-- The largest request that a worker accepts takes less than 8 MiB. Larger messages never reach a worker.
local LONGEST_MESSAGE, BYTES_KEPT, ESCAPES_PASSED = 8 * 1024 * 1024, 4096, 100000
-- Prefix affinity chooses among the first CANDIDATES messages of the next tenant. It skips a message MOST_SKIPS times
-- at most.
local CANDIDATES, MOST_SKIPS = 16, 8
-- Each message that waits for its holder makes its tenant stand aside, so there are fewer of them than tries to lease.
local lookups_left = 64

local microseconds = microseconds_now()
local leased, dead, num_refused = {}, {}, 0
local problem = ''

-- Records a problem for the reply, unless it is nil. Returns whether there is one: the caller must then leave alone the
-- messages that the problem blocks.
local function has_problem(found)
  problem = found or problem
  return found ~= nil
end

-- Returns the microseconds, by this server's clock alone, since a message was first sorted or became due; '' if
-- unknown.
local function waited(record)
  local since = record.sorted and math.max(record.sorted, record.due or 0)
  return since and string.format('%.0f', math.max(0, microseconds - since)) or ''
end

local function lease(id, record, body, deliveries, quota)
  leased[#leased + 1] = {
    id, record.list, body, deliveries, quota, record.request or '', waited(record), record.level, record.preempted or 0,
    record.choices or 1, record.grant, record.at or '', record.lost or '',
  }
end

local function give_up(body, list, deliveries, reason, request, home)
  dead_letter(body, list, deliveries, reason)
  dead[#dead + 1] = {list, body, deliveries, reason, request or '', home or ''}
end

-- Returns the part of a too large message that its dead letter keeps, and its request id. The headers are kept, or only
-- the id if they are long, because the worker needs the id to end the request. Most producers write the headers after
-- the body, some before it. If the headers cannot be read, the beginning of the message is kept.
local function shortened(body)
  local tail = string.sub(body, -LONGEST_HEADERS)
  tail = string.sub(tail, string.find(tail, '"headers":', 1, true) or #tail + 1)
  local headers = headers_in(tail)
  if not headers then
    local head = string.sub(body, 1, LONGEST_HEADERS)
    local at = string.find(head, '"headers":', 1, true)
    tail = at and string.match(head, '^"headers":%s*%b{}', at) -- anchored, so that it takes one pass
    tail = tail and tail .. '}'
    headers = tail and headers_in(tail)
  end
  local request = headers and request_of(headers)
  if not request then return string.sub(body, 1, BYTES_KEPT) end
  return #tail < BYTES_KEPT and '{' .. tail or cjson.encode({headers = {id = request}}), request
end

local function dead_letter_too_large(body, list)
  local reason = string.format('%s: %d bytes of at most %d, not kept whole', DEAD_TOO_LARGE, #body, LONGEST_MESSAGE)
  local kept, request = shortened(body)
  local answered = request and not holder_of(request) and request
  give_up(kept, list, 0, reason, answered, answered and home_of(answered))
end

-- Returns the encoded body inside the message; nil if it is not a string, or has very many escaped characters.
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

-- Returns whether a worker can read the message, judged by its envelope.
local function is_readable(message)
  if #message > LONGEST_HEADERS then return true end
  local decoded, envelope = pcall(cjson.decode, message)
  local properties = decoded and type(envelope) == 'table' and envelope.properties
  if type(properties) ~= 'table' or type(properties.delivery_info) ~= 'table' then return false end
  local encoding = properties.body_encoding or cjson.null
  return encoding == cjson.null or encoding == 'utf-8' or encoding == 'base64' and is_base64(envelope.body)
end

-- Rejects a message whose request id is bound to an earlier one, with the lease id `first`. If their content is the
-- same, the message is dropped: its client sent it again because it could not know whether the first had arrived.
-- Otherwise it becomes a dead letter. If the first message cannot be read, its request id becomes free, and the result
-- is false.
local function reject_duplicate(body, list, tenant, first)
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

-- Leases the message and returns its number of deliveries, this one included. If that exceeds the limit, makes the
-- message a dead letter and returns false.
local function deliver(id, record, body)
  local deliveries = count_delivery(id)
  if deliveries <= limit then
    grant(id, owner, record.list, seconds)
    return deliveries
  end
  give_up(body, record.list, limit, DEAD_DELIVERY_LIMIT, record.request or select(3, tenant_of(body)), record.at)
  forget(id)
  redis.call('HDEL', LEASE_DELIVERIES, id)
  return false
end

-- Leases a message that exceeds its tenant's quota to this worker, which refuses the request.
local function refuse(id, record, body)
  record.refused = true
  count_grant(record)
  keep(id, record)
  local deliveries = deliver(id, record, body)
  if not deliveries then return end
  num_refused = num_refused + 1
  lease(id, record, body, deliveries, policy.quota)
end

local function sort(list)
  local since
  while sorts_left > 0 and bytes_left > 0 do
    local body = redis.call('LINDEX', list, -1)
    if not body or has_problem(problem_of(STREAM_SERVERS, 'hash')) then return end
    sorts_left, bytes_left = sorts_left - 1, bytes_left - #body
    local id = #body <= LONGEST_MESSAGE and lease_id_of(body, QUEUE)
    local known = id and redis.call('HEXISTS', LEASE_BODIES, id) == 1
    local has_same_id = known and #body > HASHED_WHOLE and redis.call('HGET', LEASE_BODIES, id) ~= body
    if known and not has_same_id and is_orphan(id, list) then -- a script failed while it sorted this message
      forget(id)
      known = false
    end
    local tenant, prefix, request, choices, deadline, continues, conversation, due
    if id and (has_same_id or not known) then
      tenant, prefix, request, choices, deadline, continues, conversation, due = tenant_of(body)
    end
    local first = has_same_id and id or request and holder_of(request)
    if not id then
      dead_letter_too_large(body, list)
    elseif known and not has_same_id then
      dead_letter(body, list, 0, DEAD_DUPLICATE) -- a copy of a message that waits or is leased
    elseif not first or not reject_duplicate(body, list, tenant, first) then
      -- keeps the order even if the clock was set back
      since = since and since + 1
        or math.max(microseconds, number_in(redis.call('ZREVRANGE', sorted_ids_key(list), 0, 0, 'WITHSCORES')[2], 0) + 1)
      local queued = tonumber(redis.call('ZSCORE', WAITING, tenant))
      -- the quota counts the messages of this tenant, even if this one has to wait as a message of the tenant ''
      local is_over = policy.quota > 0
        and (queued or 0) + (redis.call('ZSCORE', DELAYED_TENANTS, tenant) or 0) >= policy.quota
      if not queued and redis.call('ZCARD', WAITING) >= MOST_TENANTS then tenant = '' end
      if has_problem(problem_of_tenant(list, tenant)) then tenant = '' end
      if has_problem(problem_of_tenant(list, tenant)) then return end
      local record = {
        list = list, level = list, tenant = tenant, since = since, prefix = prefix, request = request, sorted = microseconds,
        choices = choices, deadline = deadline, continues = continues, conversation = conversation,
        latest_start = due and due - time_for(estimate(tenant), policy.token_microseconds),
        at = request and home_of(request),
      }
      if is_over and mode == 'sort only' then return end -- a later fetch refuses it
      redis.call('HSET', LEASE_BODIES, id, body)
      if request then redis.call('HSET', LEASE_REQUESTS, request, id) end
      if is_over then
        refuse(id, record, body)
      else
        keep(id, record)
        enter(id, record)
      end
    end
    redis.call('LTRIM', list, 0, -2)
  end
end

local place_of, is_taken_from, may_split = {}, {}, {} -- by list
local away = policy.away

-- Returns the record of a message that waits in the list.
local function record_at(list, id)
  local record = record_of(id)
  if record then record.level = list end
  return record
end

-- Moves the messages that have waited in the list for ageing_seconds to the list of the next higher priority. Returns
-- whether there were any.
local function age(list, better)
  if has_problem(problem_of_list(better)) then return false end
  local ageing = policy.ageing_seconds * 1000000
  local aged = redis.call('ZRANGEBYSCORE', sorted_ids_key(list), '-inf', microseconds - ageing, 'LIMIT', 0, ages_left)
  ages_left = ages_left - #aged
  for _, id in ipairs(aged) do
    local record = record_at(list, id)
    if not record then -- keys were deleted by hand
      unsort(id, list)
    elseif not has_problem(problem_of_tenant(better, record.tenant)) then
      leave(id, record)
      record.level, record.since, record.first = better, record.since + ageing, record.first or record.since
      keep(id, record)
      enter(id, record)
    end
  end
  return #aged > 0
end

local held_prefixes = not lists_taken_from and policy.prefixes and {}
for _, prefix in ipairs(held_prefixes and policy.prefixes or {}) do held_prefixes[prefix] = true end

-- With a grace, a conversation's next request waits for the worker that took the last one, its holder. That worker has
-- the conversation in its prefix cache. The keys of this are hints: if one has the wrong type, messages do not wait.
local grace = held_prefixes and policy.grace
local retry_after
-- `preference(id, record)` returns how much this worker prefers a message: 2 if it is the holder of its conversation, 1
-- if a recent message began alike, else 0; nil if the message waits for another holder.
local preference
-- `hold_conversation(record)` records this worker as the holder of the message's conversation. Among more than
-- HOLDERS_KEPT conversations, it forgets the oldest of some random ones.
local hold_conversation
if held_prefixes or policy.grace then -- otherwise they are not needed, and creating them takes time
  local standings = {} -- by id: see `standing_of`
  local credits = {} -- by worker: choices that may still be offered to it

  -- Returns the worker that has the message's conversation, or nil if it is unknown. Producers choose the names of
  -- conversations, so each tenant has names of its own.
  local function holder_of_conversation(record)
    if not record.continues or lookups_left <= 0 or problem_of(HOLDERS, 'hash') then return end
    lookups_left = lookups_left - 1
    return string.match(redis.call('HGET', HOLDERS, record.continues .. ' ' .. record.tenant) or '', '^(%S+) ')
  end

  -- Offers the message to its holder, if that has free slots for it, and wakes it. Returns whether it has.
  local function offer(id, record, holder, age)
    local choices = record.choices or 1
    local credit, token = credit_key(QUEUE, holder), holder_wake_up_key(QUEUE, holder)
    credits[credit] = credits[credit] or kind_of(credit) == 'string' and number_in(redis.call('GET', credit)) or 0
    if credits[credit] < choices or problem_of(token, 'list') then return false end
    credits[credit] = credits[credit] - choices
    if record.offered ~= holder then -- the first call that offers it wakes the holder, and its worker comes back later
      record.offered = holder
      keep(id, record)
      if redis.call('EXISTS', token) == 0 then redis.call('LPUSH', token, '1') end
      redis.call('PEXPIRE', token, CREDIT_MILLISECONDS)
      retry_after = math.max(retry_after or 0, grace - age) -- the grace of all that it offers is over then
    end
    return true
  end

  -- Returns 'mine' if this worker is the holder of the message's conversation, 'waits' if the message waits for another
  -- holder now, else 'free'.
  local function standing_of(id, record)
    local holder = holder_of_conversation(record)
    if holder == owner then return 'mine' end
    local age = microseconds - math.max(record.sorted or 0, record.due or 0)
    local is_young = age >= 0 and age < grace -- negative if the clock was set back
    return holder and is_young and offer(id, record, holder, age) and 'waits' or 'free'
  end

  function preference(id, record)
    if grace and not standings[id] then standings[id] = standing_of(id, record) end
    if standings[id] == 'waits' then return nil end
    return standings[id] == 'mine' and 2 or record.prefix and held_prefixes[record.prefix] and 1 or 0
  end

  function hold_conversation(record)
    local FORGOTTEN_AMONG = 16
    if not record.conversation or problem_of(HOLDERS, 'hash') then return end
    local name = record.conversation .. ' ' .. record.tenant
    redis.call('HSET', HOLDERS, name, string.format('%s %.0f', owner, microseconds))
    redis.call('EXPIRE', HOLDERS, HOLDERS_SECONDS)
    if redis.call('HLEN', HOLDERS) <= tonumber(HOLDERS_KEPT) then return end
    local some, oldest, since = redis.call('HRANDFIELD', HOLDERS, FORGOTTEN_AMONG, 'WITHVALUES'), nil, math.huge
    for i = 1, #some, 2 do
      local taken = number_in(string.match(some[i + 1], ' (%d+)$'), 0)
      if taken < since then oldest, since = some[i], taken end
    end
    redis.call('HDEL', HOLDERS, oldest)
  end
end

-- Returns ids of the tenant's first messages, the next one first: at least `most` if it has so many. With the order
-- 'deadline' some of them may be there twice. Those with a due time are in the order of their slack.
local function first_ids(list, tenant, most)
  local all, ids = tenant_ids_key(list, tenant), {}
  if policy.order == 'deadline' then
    local deadlines = tenant_deadlines_key(list, tenant)
    for _, id in ipairs(redis.call('ZRANGE', deadlines, 0, most - 1)) do
      if redis.call('ZSCORE', all, id) then
        ids[#ids + 1] = id
      else -- keys were deleted by hand, or a worker of an earlier version took the message
        redis.call('ZREM', deadlines, id)
      end
    end
  end
  if #ids == most then return ids end
  for _, id in ipairs(by_slack(redis.call('ZRANGE', all, 0, most - 1), list, tenant)) do ids[#ids + 1] = id end
  return ids
end

-- Returns the tenant's first ids of messages that this worker may take, and whether it has left out some whose stream
-- server is away.
local function present_ids(list, tenant, most)
  if not away then return first_ids(list, tenant, most), false end
  if reads_left <= 0 then return {}, true end
  local ids, left_out = {}, false
  for _, id in ipairs(first_ids(list, tenant, math.min(reads_left, READS_OF_TENANT))) do
    reads_left = reads_left - 1
    local record = record_at(list, id)
    if record and away[record.at or ''] then left_out = true else ids[#ids + 1] = id end
    if #ids == most then break end
  end
  return ids, left_out
end

-- Returns the tenant's next message: its id, its record, and the id of the earlier message that affinity skips, if any.
-- The id is false if all messages that this looks at wait for their holders, or for stream servers that are away.
local function choose(list, tenant)
  local ids, left_out = present_ids(list, tenant, held_prefixes and CANDIDATES or 1)
  if #ids == 0 and (left_out or away and reads_left <= 0) then return false end
  if not held_prefixes then return ids[1], ids[1] and record_at(list, ids[1]) end
  local first, best, best_record, most
  for _, id in ipairs(ids) do
    local record = record_at(list, id)
    if not record and not first then return id end
    local preferred = record and preference(id, record)
    if preferred and not first then
      first, best, best_record, most = id, id, record, preferred
      if (record.skipped or 0) >= MOST_SKIPS then break end
    elseif preferred and preferred > most then
      best, best_record, most = id, record, preferred
    end
    if most == (grace and 2 or 1) then break end
  end
  if not first and #ids > 0 then return false end
  return best, best_record, best ~= first and first or nil
end

-- Returns the id and the record of the tenant's next message that arrived in one of the lists to take from, or nothing.
local function choose_of_lists(list, tenant)
  if reads_left <= 0 then return end
  for _, id in ipairs(first_ids(list, tenant, math.min(reads_left, READS_OF_TENANT))) do
    reads_left = reads_left - 1
    local record = record_at(list, id)
    if not record then return id end
    if is_taken_from[record.list] and not (away and away[record.at or '']) then return id, record end
  end
end

local function skip(list, id)
  local record = record_at(list, id)
  record.skipped = (record.skipped or 0) + 1
  keep(id, record)
end

-- Leases a message and charges its expected cost to its tenant, whose service is `start` so far. Returns whether the
-- message was leased.
local function take(id, record, start)
  local body = redis.call('HGET', LEASE_BODIES, id)
  undelay(id, record)
  place_again(record)
  local deliveries = body and deliver(id, record, body)
  leave(id, record)
  if not body then forget(id) end
  if not deliveries then return end
  if held_prefixes and record.prefix then held_prefixes[record.prefix] = true end
  if policy.grace then hold_conversation(record) end
  record.taken, record.offered = microseconds, nil
  count_grant(record)
  charge(id, record, start, policy.weights[record.tenant] or 1)
  lease(id, record, body, deliveries, 0)
  reply_bytes_left = reply_bytes_left - #body
  return true
end

-- Returns sorted messages to their list if the set of its tenants is missing, because keys were deleted by hand. The
-- next script sorts them again.
local function recover(list)
  if redis.call('EXISTS', tenants_key(list)) == 1 then return end
  local ids = redis.call('ZRANGE', sorted_ids_key(list), 0, 99)
  for i = #ids, 1, -1 do unsort(ids[i], list) end
end

-- Deletes the counts of waiting messages by tenant if the queue has no sorted messages.
local function recount(lists)
  if kind_of(WAITING) == 'none' then return end
  for _, list in ipairs(lists) do
    if redis.call('EXISTS', sorted_ids_key(list)) == 1 then return end
  end
  redis.call('DEL', WAITING)
end

-- An empty list needs no work, and no further checks of its keys.
local lists, in_use = {}, {}
for i, list in ipairs(LIST) do
  in_use[list] = redis.call('EXISTS', list, arrived_key(list), sorted_ids_key(list), tenants_key(list)) > 0
  if not has_problem(in_use[list] and (problem_of(list, 'list') or problem_of(arrived_key(list), 'list')
      or problem_of_list(list)) or nil) then
    lists[#lists + 1] = list
    place_of[list] = i
    is_taken_from[list], may_split[list] = i <= (lists_taken_from or #LIST), i <= (lists_split or #LIST)
  end
end

-- Whether messages may wait that another worker can take now. Without a grace, all that wait may be such.
local may_wake = not grace

local unsorted = 0
if is_to_sort then
  for _, list in ipairs(lists) do
    if in_use[list] then
      return_arrived(list)
      sort(list)
      recover(list)
      unsorted = unsorted + redis.call('LLEN', list)
    end
  end
  for i = #lists, 2, -1 do -- the lowest priority first, so that one call can move an old message to the top
    local is_to_age = policy.ageing_seconds > 0 and ages_left > 0 and in_use[lists[i]]
    if is_to_age and age(lists[i], lists[i - 1]) then in_use[lists[i - 1]] = true end
  end
end

local due_after
if is_to_sort and unsorted == 0 then -- no more messages move up than this call can take
  local targets
  targets, due_after = make_due_urgent(LIST, microseconds, policy.token_microseconds, wanted, away)
  for _, list in ipairs(targets) do in_use[list] = true end
end

-- If this script has sorted many bytes, the next one leases the messages, so that no script runs long.
local slots_left, first_unserved = wanted, 0
if unsorted == 0 and bytes_left <= 0 and wanted > 0 then
  unsorted = 1
elseif unsorted == 0 then
  local tries_left = wanted + 100
  for _, list in ipairs(lists) do
    local num_blocked = 0 -- tenants at the front of the order without a message to take now; they keep their places
    local is_done = not in_use[list]
    if not is_taken_from[list] then break end
    if in_use[list] and place_of[list] > lists_served then
      may_wake, first_unserved = true, place_of[list]
      break
    end
    while in_use[list] and slots_left > 0 and tries_left > 0 and reply_bytes_left > 0 do
      local least = redis.call('ZRANGE', tenants_key(list), num_blocked, num_blocked, 'WITHSCORES')
      local tenant, start = least[1], number_in(least[2], 0)
      is_done = not tenant
      if is_done then break end
      tries_left = tries_left - 1
      if has_problem(problem_of_tenant(list, tenant)) then
        num_blocked = num_blocked + 1
      else
        local id, record, skipped
        if lists_taken_from then
          id, record = choose_of_lists(list, tenant)
        else
          id, record, skipped = choose(list, tenant)
        end
        local choices = record and record.choices or 1
        if id == false then
          num_blocked = num_blocked + 1 -- its messages wait, and those of other tenants do not
          may_wake = may_wake or away ~= nil -- another worker may reach their stream servers
        elseif not id and lists_taken_from or choices > slots_left and not may_split[record.list] then
          num_blocked = num_blocked + 1
          may_wake = true
        elseif record then
          record.tenant = tenant
          slots_left = slots_left - (take(id, record, start) and choices or 0)
          if skipped then skip(list, skipped) end
        elseif id then -- keys were deleted by hand
          unsort(id, list, tenant)
        else
          redis.call('ZREM', tenants_key(list), tenant)
          redis.call('ZREM', WAITING, tenant)
        end
      end
    end
    if not is_done then may_wake = true end
  end
end
if problem == '' and #leased - num_refused < wanted then recount(lists) end
if #lists > 0 and (may_wake or unsorted > 0 or problem ~= '') then
  update_wake_up()
elseif #lists > 0 then -- all that wait have woken their holders
  redis.call('DEL', WAKE_UP)
end
if grace and #lists > 0 and unsorted == 0 then -- last, as a server that is out of memory refuses it
  if slots_left > 0 then
    redis.pcall('SET', credit_key(QUEUE, owner), slots_left, 'PX', CREDIT_MILLISECONDS)
  else
    redis.call('DEL', credit_key(QUEUE, owner))
  end
end
return {
  leased, dead, unsorted, problem, retry_after and string.format('%.0f', retry_after) or '', first_unserved,
  due_after and string.format('%.0f', due_after) or '',
}
