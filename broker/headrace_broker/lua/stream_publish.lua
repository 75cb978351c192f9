-- Appends entries to many streams in one call. Redis itself rejects every id that is not above the stream's last.
-- ARGV: seconds, writes
-- seconds: to live. writes: msgpack list of {request, id, id of the entry before it, type, data} of each.
-- Returns the failed writes: index, outcome, index, outcome, ... (indices count from 0).

local function is_cancelled(entry)
  local ok, data = pcall(cmsgpack.unpack, field(entry, 'data'))
  return ok and type(data) == 'table' and data.finish_reason == 'cancelled'
end

-- Why an entry is not the next one: false where it was written before and only the reply was lost, nil where it is.
local function verdict(key, id, before, kind, data)
  local last, attempt, tokens = tail(key)
  if not last then return 'gone' end
  local mine, offset = split_id(id)
  local _, last_offset = split_id(last[1])
  if attempt > mine then
    return field(last, 'type') == 'end' and is_cancelled(last) and 'cancelled' or 'fenced'
  end
  if attempt == mine and last_offset >= offset then
    local there = redis.call('XRANGE', key, id, id)[1]
    if there and field(there, 'type') == kind and field(there, 'data') == data then return false end
  end
  -- Another server has taken over, or this one came back without its last seconds. Either the stream lacks what was
  -- written to it, and an entry behind a gap must not be written; or it lacked a claim, so that two workers have the
  -- same attempt, and the other one has written these tokens, or has ended the stream with as many.
  local _, expected = split_id(before)
  local is_over = field(last, 'type') == 'end'
  if attempt < mine or last_offset >= offset or tokens ~= expected or is_over then return 'rolled_back' end
end

-- By stream and attempt: what comes behind a refused entry in the same call is refused with it.
local refused = {}

local function writer(request, id)
  return request .. ' ' .. string.match(id, '^%d+')
end

local failed = {}
for i, write in ipairs(cmsgpack.unpack(writes)) do
  local request, id, before, kind, data = unpack(write)
  local key = stream_key(request)
  local newest = redis.pcall('XREVRANGE', key, '+', '-', 'COUNT', 1)
  -- nearly always nothing is refused, and no name need be made
  local outcome = next(refused) and refused[writer(request, id)]
  if outcome == nil and newest.err then
    if not string.find(newest.err, 'WRONGTYPE', 1, true) then return newest end
    outcome = 'gone' -- somebody put something else there: only this request ends, not the step of all
  elseif outcome == nil and (not newest[1] or newest[1][1] ~= before) then
    outcome = verdict(key, id, before, kind, data)
  end
  if outcome == nil then
    local reply = redis.pcall('XADD', key, 'NOMKSTREAM', id, 'type', kind, 'data', data)
    if type(reply) == 'table' and reply.err then
      if not string.find(reply.err, 'equal or smaller', 1, true) then return reply end
      outcome = 'fenced' -- entries were deleted by hand, which the stream remembers
    else
      redis.call('EXPIRE', key, seconds)
      if kind == 'end' then redis.call('SET', ended_key(request), '1', 'EX', seconds + ENDED_SECONDS) end
    end
  end
  if outcome then
    refused[writer(request, id)] = outcome
    failed[#failed + 1] = i - 1
    failed[#failed + 1] = outcome
  end
end
return failed
