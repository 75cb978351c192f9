-- Messages with a due time: the header `due`, by which the request should end. Requires ready_prelude.
--
-- A message's slack is its due time, less now, less the time that it is expected to take. The queue of one model has
-- one speed, so the order by slack never changes. It is the order by `latest_start`, the time at which the slack is 0.
-- A tenant's messages without a due time keep their places, which are those of arrival. In the places of the others, the
-- one with the least slack is first.
--
-- Once its latest start has come, a message is urgent. It moves up to the second highest priority, unless it has that
-- already, and becomes the first of its tenant there. It may then preempt what was sent with a lower priority. Messages
-- of the highest priority stay before it. A message that can no longer end when it is due is late: it is behind the
-- urgent ones, so that it does not make them late too, and before those that are not urgent yet.

local time_for, by_slack, make_due_urgent
do -- a script may have 200 local variables outside of blocks
  local EXPECTED_TIMES = 2 -- time that a message gets, in expected times: those are means, and many take longer
  local PREEMPTING = 2 -- place of the list of the second highest priority
  local MOST_READ, MOST_READS = 100, 5

  -- Returns the microseconds that a request of so many tokens gets.
  function time_for(tokens, token_microseconds)
    return EXPECTED_TIMES * tokens * token_microseconds
  end

  -- Returns ids of a tenant's first messages, with those that have a due time in the order of their slack. If the first
  -- one has a due time, it changes places with the one that has the least slack.
  -- ids: of the first messages in the order of their places.
  function by_slack(ids, list, tenant)
    local all, starts = tenant_ids_key(list, tenant), tenant_starts_key(list, tenant)
    if #ids == 0 or redis.call('EXISTS', starts) == 0 then return ids end
    local least, taken = redis.call('ZRANGE', starts, 0, #ids - 1), 0
    for place, id in ipairs(ids) do
      if redis.call('ZSCORE', starts, id) then
        taken = taken + 1
        while least[taken] and not redis.call('ZSCORE', all, least[taken]) do
          redis.call('ZREM', starts, least[taken]) -- keys were deleted by hand, or an earlier version took the message
          table.remove(least, taken)
        end
        ids[place] = least[taken] or id
        if place == 1 and ids[1] ~= id then
          local first, other = redis.call('ZSCORE', all, id), redis.call('ZSCORE', all, ids[1])
          redis.call('ZADD', all, first, ids[1], other, id)
        end
      end
    end
    return ids
  end

  -- Returns the microseconds in which one request of average cost ends.
  local function mean_time(token_microseconds)
    return number_in(redis.call('GET', MEAN_COST), FIRST_ESTIMATE) * token_microseconds
  end

  -- Returns how many of the first messages must start now, and the microseconds until one must. Messages that are due
  -- at the same time cannot all start at once. So if n messages are before one, the first of them must start n intervals
  -- earlier. Some of the places are looked at, each about twice as far as the one before.
  -- at: now, in unix microseconds; interval: microseconds between two starts.
  local function num_to_start(at, interval)
    local waiting = redis.call('ZCARD', LATEST_STARTS)
    local place, found, soonest = 0, 0, math.huge
    while place < waiting do
      local start = number_in(redis.call('ZRANGE', LATEST_STARTS, place, place, 'WITHSCORES')[2], at) - place * interval
      if start <= at then found = place + 1 end
      soonest = math.min(soonest, start - at)
      place = place == waiting - 1 and waiting or math.min(2 * place + 1, waiting - 1)
    end
    return found, soonest
  end

  -- Returns the microseconds between two starts of requests below the highest priority, if those that run now and
  -- `most` more run at once.
  local function interval_of_starts(lists, token_microseconds, most)
    local num_running = most
    for place = 2, #lists do
      local held = held_key(lists[place])
      num_running = num_running + (problem_of(held, 'zset') and 0 or redis.call('ZCARD', held))
    end
    return mean_time(token_microseconds) / math.max(1, num_running)
  end

  -- Makes the message urgent, or late. Returns whether it can be taken: no key of the wrong type blocks it. Also returns
  -- the list where it waits now, unless it was urgent or late before.
  -- places: of the lists of the queue, by name; at: now, in unix microseconds.
  local function move_up(id, record, lists, places, at, urgency)
    if record.urgency == urgency then return true end
    local better = lists[PREEMPTING]
    local target = places[record.level] > PREEMPTING and better or record.level
    if problem_of_place(record) or problem_of_place({level = target, tenant = record.tenant}) then return false end
    leave(id, record)
    record.urgency = urgency
    if target ~= record.level then
      record.level, record.held, record.first = target, math.max(0, at - record.since), nil -- its age there is 0
    end
    if places[record.list] > PREEMPTING then record.list = better end -- as if it had been sent with that priority
    keep(id, record)
    enter(id, record)
    return true, target
  end

  -- Moves up the messages that must start now, at most `most` of those that are not late. Messages that this worker
  -- cannot take do not count.
  -- lists: the lists of the queue; at: now, in unix microseconds; token_microseconds: expected time of one token; away: a
  -- map whose keys are the stream servers that this worker cannot write to, or nil.
  -- Returns the lists where they wait, and the microseconds until the next message must start, or nil if none has to.
  function make_due_urgent(lists, at, token_microseconds, most, away)
    local targets, places = {}, {}
    if problem_of(LATEST_STARTS, 'zset') or redis.call('EXISTS', LATEST_STARTS) == 0 then return targets, nil end
    for place, list in ipairs(lists) do places[list] = place end
    local count, soonest = num_to_start(at, interval_of_starts(lists, token_microseconds, most))
    local too_late = at - (EXPECTED_TIMES - 1) * mean_time(token_microseconds)
    local place, num_left = 0, 0 -- messages that were looked at, and those of them that are still in LATEST_STARTS

    -- Moves a message up if it must start now. Returns whether no later message is to be looked at.
    local function look_at(id)
      place = place + 1
      local record = record_of(id)
      if most <= 0 or place > count and record and (record.latest_start or 0) > at then return true end
      local waits = record and places[record.level] and places[record.list]
        and redis.call('ZSCORE', tenant_ids_key(record.level, record.tenant), id)
      local is_late = waits and record.latest_start and record.latest_start < too_late
      if not waits then -- keys were deleted by hand, or a worker of an earlier version took the message
        redis.call('ZREM', LATEST_STARTS, id)
      elseif is_late or not (away and away[record.at or '']) then
        local can_take, target = move_up(id, record, lists, places, at, is_late and LATE or URGENT)
        targets[#targets + 1] = target
        if can_take and not is_late then most = most - 1 end
      end
      if away and redis.call('ZSCORE', LATEST_STARTS, id) then num_left = num_left + 1 end
      return false
    end

    for _ = 1, MOST_READS do -- messages that this worker cannot take must not hide the others
      local ids, is_done = redis.call('ZRANGE', LATEST_STARTS, num_left, num_left + MOST_READ - 1), not away
      for _, id in ipairs(ids) do
        if look_at(id) then
          is_done = true
          break
        end
      end
      if is_done or #ids < MOST_READ then break end
    end
    return targets, redis.call('EXISTS', LATEST_STARTS) == 1 and math.max(0, soonest) or nil
  end
end
