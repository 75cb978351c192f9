-- Shared by the stream scripts. An entry is {id, {name, value, ...}}; its id is <attempt>-<tokens after this entry>.

local function field(entry, name)
  for i = 1, #entry[2], 2 do
    if entry[2][i] == name then return entry[2][i + 1] end
  end
end

local function last_entry(key, below)
  return redis.call('XREVRANGE', key, below, '-', 'COUNT', 1)[1]
end

local function split_id(id)
  local attempt, offset = string.match(id, '^(%d+)-(%d+)$')
  return tonumber(attempt), tonumber(offset)
end

-- The last entry (nil where there is no stream), its attempt, and the tokens generated so far by all attempts.
local function tail(key)
  local last = last_entry(key, '+')
  if not last then return nil, 0, 0 end
  local attempt = split_id(last[1])
  -- a start says nothing about tokens: what counts is the last chunk of the attempts before it
  local entry = last
  while entry and field(entry, 'type') == 'start' do
    entry = last_entry(key, '(' .. entry[1])
  end
  if not entry then return last, attempt, 0 end
  local _, offset = split_id(entry[1])
  if field(entry, 'type') == 'end' then offset = offset - 1 end
  return last, attempt, offset
end

local function append(key, attempt, offset, kind, data)
  redis.call('XADD', key, string.format('%.0f-%.0f', attempt, offset), 'type', kind, 'data', data)
end
