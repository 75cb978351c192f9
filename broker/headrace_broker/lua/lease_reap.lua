-- Returns messages whose lease has expired to their queue, and orphans: messages that are neither leased nor waiting.
-- Wakes a worker for messages whose woken worker may have died.
-- KEYS: LIST[]
-- ARGV: most
-- LIST: the lists of the queue. most: how many expired leases one call handles. Result: {number of messages with an
-- expired lease that it returned, the problem that blocks others or '', number of orphans that it returned}.
local RETRY_SECONDS = 1
-- This removal of nothing fails while the server accepts no writes, and the call ends. The other workers cannot renew
-- their leases either at that time, so an expired lease does not mean a dead worker.
redis.call('ZREM', LEASES, '')
local STALE_CHECKED, ORPHANS_CHECKED = 100, 20
local expired = redis.call('ZRANGEBYSCORE', LEASES, '-inf', now(), 'LIMIT', 0, most)
local num_requeued, num_orphans, problem = 0, 0, ''

-- Removes ended leases from the list's sets of held and of delayed leases. They are still there if keys were deleted by
-- hand, or if a worker of an earlier version, which does not maintain these sets, ended them. A message that is neither
-- leased nor waiting returns to the queue.
local function drop_stale(list)
  for _, leases in ipairs({held_key(list), delayed_key(list)}) do
    -- a key of the wrong type blocks no message, and wrong_keys.lua reports it
    local is_set = not problem_of(leases, 'zset')
    local ids = is_set and redis.call('ZRANGEBYSCORE', leases, '-inf', now(), 'LIMIT', 0, STALE_CHECKED)
    for _, id in ipairs(ids or {}) do
      local meta = redis.call('HGET', LEASE_META, id)
      local is_delayed = meta == 'delayed|' .. list
      if not meta and redis.call('HEXISTS', LEASE_BODIES, id) == 1 and is_orphan(id, list) then
        local blocked_by = requeue(id, list)
        problem = blocked_by or problem
        if not blocked_by then
          num_orphans = num_orphans + 1
          redis.call('ZREM', leases, id)
        end
      elseif not meta or list_of(meta) ~= list or is_delayed ~= (leases == delayed_key(list)) then
        redis.call('ZREM', leases, id)
      elseif not redis.call('ZSCORE', LEASES, id) then
        redis.call('ZADD', LEASES, now(), id)
      end
    end
  end
end

for _, list in ipairs(LIST) do drop_stale(list) end
for i = #expired, 1, -1 do
  local id = expired[i]
  local meta = redis.call('HGET', LEASE_META, id)
  local blocked_by = requeue(id, meta and list_of(meta))
  if blocked_by then
    redis.call('ZADD', LEASES, now() + RETRY_SECONDS, id) -- behind the leases whose messages can be returned
    problem = blocked_by
  else
    num_requeued = num_requeued + 1
  end
end
-- A worker of an earlier version deletes a message, but leaves its request id in LEASE_REQUESTS.
if redis.call('HLEN', LEASE_REQUESTS) > redis.call('HLEN', LEASE_BODIES) then
  for _, request in ipairs(redis.call('HRANDFIELD', LEASE_REQUESTS, STALE_CHECKED)) do
    if not holder_of(request) then redis.call('HDEL', LEASE_REQUESTS, request) end
  end
end
-- A script that failed midway may leave an orphan, and so may keys that were deleted by hand. Each call checks some
-- stored messages at random, so it finds every orphan that has a record in time. A message without a record is still in
-- its list, where the next fetch finds it, unless the record was deleted by hand.
for _, id in ipairs(redis.call('HRANDFIELD', LEASE_BODIES, ORPHANS_CHECKED)) do
  if is_orphan(id) and not requeue(id) then num_orphans = num_orphans + 1 end
end
-- Deadlines of messages that do not wait remain if keys were deleted by hand, or if a worker of an earlier version took
-- the messages. The first one that remains is then the deadline of a waiting message.
local function waits(id)
  local record = record_of(id)
  local ids = record and sorted_ids_key(record.level)
  return ids and not problem_of(ids, 'zset') and redis.call('ZSCORE', ids, id)
end

for _ = 1, problem_of(DEADLINES, 'zset') and 0 or STALE_CHECKED do
  local id = redis.call('ZRANGE', DEADLINES, 0, 0)[1]
  if not id or waits(id) then break end
  redis.call('ZREM', DEADLINES, id)
end
wake(LIST)
return {num_requeued, problem, num_orphans}
