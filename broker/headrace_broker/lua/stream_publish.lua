-- Appends entries to many streams in one call. Redis itself rejects every id that is not above the stream's last.
-- KEYS: the stream of each write; then, for each write that is an end, the mark of it.
-- ARGV: seconds to live, seconds that a mark outlives its stream; then id, type, data of each write.
-- Returns the failed writes: index, outcome, index, outcome, ... (indices count from 0).

-- Why an id was rejected: false where this very attempt wrote it before and only the reply was lost.
local function rejection(key, id)
  local last = last_entry(key, '+')
  if not last then return 'fenced' end -- the entries were deleted by hand
  local mine = split_id(id)
  if split_id(last[1]) == mine then return false end
  if field(last, 'type') == 'end' then
    local ok, data = pcall(cmsgpack.unpack, field(last, 'data'))
    if ok and type(data) == 'table' and data.finish_reason == 'cancelled' then return 'cancelled' end
  end
  return 'fenced'
end

local failed = {}
local num_writes = (#ARGV - 2) / 3
local mark = num_writes
for i = 1, num_writes do
  local key, id, kind, data = KEYS[i], ARGV[3 * i], ARGV[3 * i + 1], ARGV[3 * i + 2]
  if kind == 'end' then mark = mark + 1 end
  local reply = redis.pcall('XADD', key, 'NOMKSTREAM', id, 'type', kind, 'data', data)
  local outcome = false
  if not reply then
    outcome = 'gone'
  elseif type(reply) == 'table' and reply.err then
    if string.find(reply.err, 'WRONGTYPE', 1, true) then
      outcome = 'gone' -- somebody put something else there: only this request ends, not the step of all
    elseif string.find(reply.err, 'equal or smaller', 1, true) then
      outcome = rejection(key, id)
    else
      return reply
    end
  else
    redis.call('EXPIRE', key, ARGV[1])
    if kind == 'end' then redis.call('SET', KEYS[mark], '1', 'EX', ARGV[1] + ARGV[2]) end
  end
  if outcome then
    failed[#failed + 1] = i - 1
    failed[#failed + 1] = outcome
  end
end
return failed
