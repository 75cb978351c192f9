-- Appends entries to many streams in one call. Redis itself rejects an id that is not above the stream's last.
-- ARGV: seconds, writes, prefix
-- seconds: lifetime of the streams. writes: msgpack list of {request, id, id of the entry before it, type, data}.
-- prefix: what precedes a request id in the keys of a shard of a Redis Cluster, else ''. A shard also gets one of the
-- streams in KEYS, without a name here, by which the node knows whether it has their slot.
-- Returns the failed writes: index, outcome, index, outcome, ... (indices count from 0).

local function is_cancelled(entry)
  local ok, data = pcall(cmsgpack.unpack, field(entry, 'data'))
  return ok and type(data) == 'table' and data.finish_reason == 'cancelled'
end

-- Returns why an entry cannot be appended; nil if it can, false if it was written before and only the reply was lost.
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
  -- Each of these conditions shows that the server lost its last writes, in a failover or a restart. If it lost
  -- entries, this one would leave a gap. If it lost a claim, another worker has the same attempt number. That worker
  -- has written these tokens, or has ended the stream after as many.
  local _, expected = split_id(before)
  local is_over = field(last, 'type') == 'end'
  if attempt < mine or last_offset >= offset or tokens ~= expected or is_over then return 'rolled_back' end
end

-- Outcomes by stream and attempt. Entries after a refused one in the same call are refused too.
local refused = {}

local function writer(request, id)
  return request .. ' ' .. string.match(id, '^%d+')
end

local failed = {}
for i, write in ipairs(cmsgpack.unpack(writes)) do
  local request, id, before, kind, data = unpack(write)
  request = prefix .. request
  local key = stream_key(request)
  local newest = redis.pcall('XREVRANGE', key, '+', '-', 'COUNT', 1)
  -- usually `refused` is empty, and its key need not be built
  local outcome = next(refused) and refused[writer(request, id)]
  if outcome == nil and newest.err then
    if not string.find(newest.err, 'WRONGTYPE', 1, true) then return newest end
    outcome = 'gone' -- the key holds another type: only this request fails, not all requests of the step
  elseif outcome == nil and (not newest[1] or newest[1][1] ~= before) then
    outcome = verdict(key, id, before, kind, data)
  end
  if outcome == nil then
    local reply = redis.pcall('XADD', key, 'NOMKSTREAM', id, 'type', kind, 'data', data)
    if type(reply) == 'table' and reply.err then
      if not string.find(reply.err, 'equal or smaller', 1, true) then return reply end
      outcome = 'fenced' -- entries were deleted by hand, but the stream keeps its last id
    end
  end
  -- also for an end that was written before: Redis may have refused the commands after it
  if outcome == nil or outcome == false and kind == 'end' then
    redis.call('EXPIRE', key, seconds)
    if kind == 'end' then redis.call('SET', ended_key(request), '1', 'EX', seconds + ENDED_SECONDS) end
  end
  if outcome then
    refused[writer(request, id)] = outcome
    failed[#failed + 1] = i - 1
    failed[#failed + 1] = outcome
  end
end
return failed
